"""Switches of tensor-parallel groups in the rounds of a rollout."""

from typing import Any

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.rollout.coordinator.messages import (
    GroupAdded,
    InstanceLost,
    PolicyChanged,
    PromptsEnded,
    SwitchTp,
    TpSwitched,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.policies.adaptive_tp.settings import AdaptiveTpSettings
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import SampleGroupId, TrajectoryId
from tests.rollout.adaptive_tp.oracle import profile, subject
from tests.rollout.fleet import PROMPT, Fleet

LONG = 60


def step_s(tp: int, rows: int, _tokens: float) -> float:
    """Large groups are faster with a few rows only."""
    return 8 / tp + (0.6 * rows if tp > 1 else 0)


ADAPTIVE = AdaptiveTpSettings(profile=profile(step_s, switch_s=30.0), response_tokens_max=LONG)


def settings(staleness: int = 0, **fields: Any) -> CoordinatorSettings:
    return CoordinatorSettings(
        staleness=StalenessSettings(staleness=staleness, batch_groups=8, group_size=2),
        cost_model=CostModel(k1=1e-4, k2=0.02, k3=0.001, k4=0.1, k5=1.0),
        adaptive_tp=ADAPTIVE,
        **fields,
    )


def fleet_of(instances: int, budget: int = 4096) -> Fleet:
    """The samples of one prompt are long, as in the round before."""
    fleet = Fleet(settings())
    fleet.core.trajectories.lengths.recent = [3] * 14 + [LONG] * 2
    for _ in range(instances):
        fleet.join(budget)
    fleet.add_groups()
    for each in range(16 * 10):
        fleet.lengths[TrajectoryId(each)] = LONG if each % 16 < 2 else 3
    return fleet


def switches(fleet: Fleet) -> list[SwitchTp]:
    return [each for _, found in fleet.log for each in found if isinstance(each, SwitchTp)]


def drain(fleet: Fleet, *, until_switch: bool = True) -> None:
    """Decode until a switch is decided, or the round has ended; nothing of the round is missing
    then."""
    fleet.ask_for_batch()
    before = len(switches(fleet))
    while fleet.training is None and (not until_switch or len(switches(fleet)) == before):
        look(fleet)


def look(fleet: Fleet) -> None:
    """One step of all engines, and a snapshot."""
    for engine in fleet.engines.values():
        while engine.to_run:
            fleet.run_command(engine)
        fleet.decode(engine)
        while engine.sent:
            fleet.deliver(engine)
    while fleet.to_reward:
        fleet.reward(0)
    fleet.snapshot()


def test_the_last_samples_of_a_round_get_all_ranks_and_the_next_round_begins_with_few() -> None:
    fleet = fleet_of(1)
    drain(fleet)
    (switch,) = switches(fleet)
    (engine,) = fleet.engines.values()
    assert (switch.tp, engine.tp) == (4, 1)
    assert len(engine.held) == 2
    drain(fleet, until_switch=False)
    assert engine.tp == 4
    assert len(switches(fleet)) == 1
    fleet.finish_training()
    fleet.add_groups()
    drain(fleet)
    assert engine.tp == 1
    assert len(switches(fleet)) == 2


def test_nothing_switches_in_the_first_round() -> None:
    """The first responses that end are the shortest, and tell nothing of the others."""
    fleet = fleet_of(1)
    fleet.core.trajectories.lengths.recent = []
    drain(fleet, until_switch=False)
    assert not switches(fleet)


def test_a_switch_is_issued_once_until_it_is_answered() -> None:
    fleet = fleet_of(1)
    drain(fleet)
    (engine,) = fleet.engines.values()
    fleet.snapshot()
    fleet.restart()
    fleet.snapshot()
    assert len(switches(fleet)) == 1
    # The engine could not: the next snapshot shows the old groups, and it is told again.
    engine.to_run.clear()
    fleet.handle(TpSwitched(instance=engine.name, has_switched=False))
    fleet.snapshot()
    assert len(switches(fleet)) == 2
    fleet.restart()
    engine.to_run.clear()
    fleet.handle(TpSwitched(instance=engine.name, has_switched=True))
    with pytest.raises(InvalidRequestError, match="no unanswered SwitchTp"):
        fleet.handle(TpSwitched(instance=engine.name, has_switched=True))


def test_nothing_switches_while_samples_wait_or_are_to_come() -> None:
    fleet = Fleet(settings())
    fleet.core.trajectories.lengths.recent = [3] * 14 + [LONG] * 2
    fleet.join(4096)
    for each in range(16):
        fleet.lengths[TrajectoryId(each)] = LONG if each < 2 else 3
    for group in range(7):
        fleet.handle(GroupAdded(group=SampleGroupId(group), prompt_tokens=PROMPT))
    for _ in range(8):
        look(fleet)
    assert not switches(fleet)
    # No other prompt will come.
    fleet.handle(PromptsEnded())
    look(fleet)
    assert len(switches(fleet)) == 1
    # Samples that wait in an engine's queue, or for an instance, need small groups.
    narrow = fleet_of(1, budget=40)
    for _ in range(8):
        look(narrow)
    assert not switches(narrow)


def test_a_lost_instance_takes_its_switch_with_it() -> None:
    fleet = fleet_of(2)
    drain(fleet)
    switch = switches(fleet)[0]
    fleet.kill(switch.instance)
    fleet.handle(TpSwitched(instance=switch.instance, has_switched=True))
    fleet.handle(InstanceLost(instance=switch.instance))
    drain(fleet, until_switch=False)
    assert fleet.training is not None


def test_a_policy_without_a_profile_switches_nothing() -> None:
    fleet = fleet_of(1)
    fleet.handle(PolicyChanged(bound=fleet.settings.staleness))
    drain(fleet)
    assert not switches(fleet)


def test_settings_that_leave_no_last_samples_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="with a staleness of 1 others follow"):
        settings(staleness=1)
    with pytest.raises(InvalidRequestError, match="no point of tp 1"):
        AdaptiveTpSettings(
            profile=type(ADAPTIVE.profile)(subject=subject()), response_tokens_max=LONG
        )
