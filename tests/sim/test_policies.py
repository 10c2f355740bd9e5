"""The names of simulated policies: each is a set of settings that a scheduler takes."""

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.ordering import ORDERINGS
from plexrl.scheduler.policies import POLICIES
from plexrl.sim.policies import SIM_POLICIES, sim_policy
from plexrl.sim.shell import virtual_config


@pytest.mark.parametrize("name", SIM_POLICIES)
def test_every_policy_is_settings_of_the_real_scheduler(name: str) -> None:
    policy = sim_policy(name)
    config = virtual_config(**policy.settings)
    assert {key: getattr(config, key) for key in policy.settings} == policy.settings
    assert policy.name == name
    assert policy.source


def test_every_placement_and_no_rule_twice() -> None:
    assert {policy.settings["policy"] for policy in SIM_POLICIES.values()} == set(POLICIES)
    rules = {tuple(sorted(policy.settings.items())) for policy in SIM_POLICIES.values()}
    assert len(rules) == len(SIM_POLICIES)
    assert {policy.settings.get("ordering", "hrrs") for policy in SIM_POLICIES.values()} == set(
        ORDERINGS
    ) - {"fifo-operations"}


def test_an_unknown_policy_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(InvalidRequestError, match="spread\\+backfill, rollmux, fifo-lock"):
        sim_policy("lottery")
