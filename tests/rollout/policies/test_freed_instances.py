"""Rounds that free instances, over random histories of a fleet: instances die, messages cross, and
the coordinator is restored from its state."""

from dataclasses import replace
from random import Random

import pytest

from plexrl.errors import InvalidRequestError, InvariantError
from plexrl.rollout.coordinator.messages import (
    InstanceLost,
    InstancesChosen,
    Interrupt,
    PolicyChanged,
    Pull,
    ReportScaleDown,
    RolloutCommand,
    RolloutEvent,
    Route,
    Train,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.policies.scale_down import ScaleDownSettings
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import InstanceId, TrajectoryId
from tests.rollout.fleet import Fleet
from tests.rollout.history import LENGTH_MAX, LIKELY, History, settings_from

ACTIONS = [each for each in LIKELY if each not in ("change_policy", "end_prompts")]
SCALE_DOWN = ScaleDownSettings(response_tokens_max=LENGTH_MAX)


class StreamedHistory(History):
    """A history of synchronous rounds, short and long ones or all alike, that free instances."""

    def make_fleet(self) -> Fleet:
        found = settings_from(self.random)
        sizes = replace(
            found.staleness,
            staleness=0,
            batch_groups=self.random.randint(2, 4),
            extra_groups=self.random.choice((0, 0, 1, 2)),
        )
        return Fleet(replace(found, staleness=sizes, scale_down=SCALE_DOWN))

    def look(self) -> None:
        super().look()
        core = self.fleet.core
        at = [core.trajectories.on_instance(each) for each in core.freed.held.freed]
        if any(each.state == "routed" for held in at for each in held):
            raise InvariantError("a freed instance has work", law="freed instances")


def check_log(log: list[tuple[RolloutEvent, list[RolloutCommand]]]) -> int:
    """How often instances were freed. Between that and the end of the round, they get nothing, and
    no others are freed."""
    free: set[InstanceId] = set()
    times, is_down = 0, False
    for event, commands in log:
        gone = list(event.drained) if isinstance(event, InstancesChosen) else []
        if isinstance(event, InstanceLost):
            gone.append(event.instance)
        for each in gone:
            free = free - {each} if each in free else set()
        for command in commands:
            match command:
                case Train():
                    free, is_down = set(), False
                case ReportScaleDown() if command.freed:
                    assert not is_down, "twice in a round"
                    free, is_down = set(command.freed), True
                    times += 1
                case Route() | Pull():
                    assert command.instance not in free
                case Interrupt():
                    pass
    return times


def played(seed: int, actions: int) -> StreamedHistory:
    history = StreamedHistory(Random(seed))
    for _ in range(actions):
        history.run(history.random.choice(ACTIONS))
    history.finish()
    return history


def test_freed_instances_get_nothing_until_the_next_round_and_nothing_is_lost() -> None:
    times = sum(check_log(played(seed, 50).fleet.log) for seed in range(720))
    assert times > 80


@pytest.mark.slow
def test_many_streamed_histories() -> None:
    for seed in range(1000, 11_000):
        check_log(played(seed, 60).fleet.log)


def fleet_of(instances: int, budget: int = 100, prompts: int = 4) -> Fleet:
    settings = CoordinatorSettings(
        staleness=StalenessSettings(staleness=0, batch_groups=prompts, group_size=2),
        cost_model=CostModel(k1=1e-4, k2=0.02, k3=0.01, k4=0.1, k5=1.0),
        scale_down=ScaleDownSettings(response_tokens_max=50),
    )
    fleet = Fleet(settings)
    for _ in range(instances):
        fleet.join(budget)
    for each in range(40 * prompts):
        # Prompts 2, 3, 6, 7 and so on have long samples.
        fleet.lengths[TrajectoryId(each)] = 40 if each // 2 % 4 >= 2 else 2
    return fleet


def freed_of(fleet: Fleet) -> list[tuple[InstanceId, ...]]:
    reports = [c for _, commands in fleet.log for c in commands if isinstance(c, ReportScaleDown)]
    return [each.freed for each in reports]


def test_work_moves_to_the_others_and_the_instances_come_back_for_the_next_round() -> None:
    fleet = fleet_of(4)
    while not any(freed_of(fleet)):
        fleet.round()
    free, trained = set(freed_of(fleet)[-1]), len(fleet.trained)
    assert len(free) == 2
    assert any(fleet.engines[each].held for each in free)
    fleet.round()
    while len(fleet.trained) == trained:
        assert not any(fleet.engines[each].held for each in free)
        fleet.round()
    assert fleet.core.freed.held.freed == []
    fleet.round()
    fleet.round()
    assert all(fleet.engines[each].version == len(fleet.trained) for each in free)


def test_what_does_not_fit_on_the_others_stays_where_it_is() -> None:
    fleet = fleet_of(2, budget=90)
    while len(fleet.trained) < 3:
        fleet.round()
    assert freed_of(fleet)
    assert not any(freed_of(fleet))


def test_a_restart_after_a_decision_against_it_changes_nothing() -> None:
    logs = []
    for restarts in (False, True):
        fleet = fleet_of(4, budget=60)
        while len(fleet.trained) < 4:
            fleet.round()
            if restarts:
                fleet.restart()
        logs.append([command for _, commands in fleet.log for command in commands])
    assert logs[0] == logs[1]


def test_if_another_instance_is_lost_the_round_takes_the_freed_ones() -> None:
    fleet = fleet_of(2, budget=200)
    while not any(freed_of(fleet)):
        fleet.round()
    (free,) = freed_of(fleet)[-1]
    (other,) = fleet.engines.keys() - {free}
    fleet.kill(other)
    while not fleet.trained:
        fleet.round()
    assert sum(map(bool, freed_of(fleet))) == 1


def test_another_policy_takes_the_freed_instances() -> None:
    fleet = fleet_of(2, budget=200)
    while not any(freed_of(fleet)):
        fleet.round()
    fleet.handle(PolicyChanged(bound=fleet.settings.staleness))
    assert fleet.core.freed.held.freed == []
    while len(fleet.trained) < 2:
        fleet.round()
    assert sum(map(bool, freed_of(fleet))) == 1


def test_only_synchronous_rounds_free_instances() -> None:
    with pytest.raises(InvalidRequestError, match="staleness"):
        CoordinatorSettings(
            staleness=StalenessSettings(staleness=1, batch_groups=2),
            cost_model=CostModel(k1=1e-4, k2=0.02, k3=0.01, k4=0.1, k5=1.0),
            scale_down=SCALE_DOWN,
        )
