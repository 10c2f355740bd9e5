"""Simulated policies are valid scheduler settings."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.rules.ordering import ORDERINGS
from plexrl.scheduler.rules.policies import POLICIES
from plexrl.sim.engine.shell import virtual_config
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.workload.policies import SIM_POLICIES, sim_policy
from plexrl.sim.workload.scenario import Pool, Scenario
from plexrl.traces import TraceJob, TraceSegment


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


@dataclass(frozen=True)
class LargeBetweenSmall:
    """A job that leaves half of the cluster free, one that needs all of it, and half an hour later
    one that the free half would hold."""

    def jobs(self) -> Iterator[TraceJob]:
        """All jobs in order of submission."""
        for name, submit_s, gpus, cycles in (
            ("first", 0.0, 8, 36),
            ("large", 10.0, 16, 3),
            ("small", 1800.0, 8, 3),
        ):
            yield TraceJob(
                job_id=name,
                submit_s=submit_s,
                gpus=gpus,
                cycles=cycles,
                period_s=100.0,
                segments=(TraceSegment(function="update", offset_s=70.0, duration_s=30.0),),
                state_bytes=1 << 34,
            )


def test_only_the_isolated_policy_that_backfills_lets_jobs_pass_one_that_waits_for_long() -> None:
    scenario = Scenario(source=LargeBetweenSmall(), pools=(Pool(nodes=2),), policy="isolated")
    held_up = simulate(scenario)
    passed = simulate(replace(scenario, policy="isolated+backfill"))
    # The first job takes an hour, and the large one waits for it either way.
    assert held_up.wait.highest == pytest.approx(passed.wait.highest, rel=0.05)
    assert held_up.wait.median > 1800.0
    assert passed.wait.median == 0.0
    # A job alone moves its state once, which no job could do without.
    assert 0.0 <= held_up.job_slowdown.highest < 0.01
    assert 0.0 <= passed.job_slowdown.highest < 0.01
