"""Events in, exact commands out: one coordinator, led by hand."""

import pytest

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    Abort,
    BatchRequested,
    Generated,
    GenerationFailed,
    GroupAdded,
    GroupFiltered,
    InstanceJoined,
    InstanceLost,
    Interrupt,
    ParametersPushed,
    Pull,
    Pulled,
    ReportDroppedGroup,
    Rewarded,
    RolloutCommand,
    RolloutEvent,
    Route,
    SnapshotTaken,
    Stopped,
    StoppedTrajectory,
    Train,
    TrainedTrajectory,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings, are_equal
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    TrajectoryId,
    TrajectorySegment,
    TrajectoryState,
)

A, B = InstanceId("a"), InstanceId("b")
PROMPT = 10
MODEL = CostModel(k1=1e-3, k2=2e-2, k3=1e-2, k4=1e-1, k5=1.0)


def segments(tokens: int, version: int = 0) -> tuple[TrajectorySegment, ...]:
    return (TrajectorySegment(tokens=tokens, policy_version=version, kv_version=version),)


class Led:
    """A coordinator with instances that show what a test tells them to show."""

    def __init__(
        self,
        *,
        groups: int,
        instances: tuple[InstanceId, ...] = (A,),
        extra_samples: int = 0,
        failures_max: int = 3,
        throughput_ratio_max: float = 5.0,
    ) -> None:
        settings = CoordinatorSettings(
            staleness=StalenessSettings(staleness=1, batch_groups=1, extra_samples=extra_samples),
            cost_model=MODEL,
            failures_max=failures_max,
            throughput_ratio_max=throughput_ratio_max,
        )
        self.core = RolloutCoordinator(settings)
        for name in instances:
            self.do(InstanceJoined(instance=name, version=0, kv_budget=100))
        for group in range(groups):
            self.do(GroupAdded(group=SampleGroupId(group), prompt_tokens=PROMPT))

    def do(self, event: RolloutEvent) -> list[RolloutCommand]:
        commands = self.core.handle(event)
        self.core.check_invariants()
        return commands

    def show(
        self,
        *shown: tuple[InstanceId, list[int], list[int], int],
        version: int = 0,
        versions: dict[InstanceId, int] | None = None,
        silent: tuple[InstanceId, ...] = (),
    ) -> list[RolloutCommand]:
        """A snapshot: running, waiting and the number of completed trajectories of each."""
        return self.do(
            SnapshotTaken(
                instances=tuple(
                    InstanceSnapshot(
                        instance=name,
                        version=(versions or {}).get(name, version),
                        kv_cache=20.0 * len(running),
                        running=tuple(map(TrajectoryId, running)),
                        running_tokens=(20,) * len(running),
                        waiting=tuple(map(TrajectoryId, waiting)),
                        waiting_tokens=(20,) * len(waiting),
                        completed=completed,
                        serves=name not in silent,
                    )
                    for name, running, waiting, completed in shown
                )
            )
        )

    def finish(
        self, trajectory: int, instance: InstanceId = A, version: int = 0
    ) -> list[RolloutCommand]:
        """Generates and rewards it."""
        number, drawn = TrajectoryId(trajectory), segments(5, version)
        commands = self.do(Generated(trajectory=number, instance=instance, segments=drawn))
        return commands + self.do(Rewarded(trajectory=number, reward=1.0))


def ids(*numbers: int) -> tuple[TrajectoryId, ...]:
    return tuple(map(TrajectoryId, numbers))


def stopped(instance: InstanceId, *returned: int, tokens: int = 0, version: int = 0) -> Stopped:
    new = segments(tokens, version) if tokens else ()
    each = tuple(StoppedTrajectory(trajectory=TrajectoryId(n), segments=new) for n in returned)
    return Stopped(instance=instance, trajectories=each)


def test_a_batch_from_prompt_to_training() -> None:
    led = Led(groups=2)
    assert led.show((A, [], [], 0)) == [Route(instance=A, trajectories=ids(0, 1))]
    assert led.do(BatchRequested()) == []
    assert led.finish(1) == [
        Train(
            version=0,
            batch=(
                TrainedTrajectory(
                    trajectory=TrajectoryId(1),
                    group=SampleGroupId(1),
                    version=0,
                    prompt_tokens=PROMPT,
                    segments=segments(5),
                    reward=1.0,
                ),
            ),
        )
    ]
    assert led.core.groups_wanted == 1


def test_a_snapshot_from_before_a_command_is_refused() -> None:
    """StaleFlow Fig. 12 (a)."""
    led = Led(groups=2)
    led.show((A, [], [], 0))
    assert led.show((A, [], [], 0)) == []
    assert led.show((A, [0], [], 0)) == []
    assert (led.core.snapshots_used, led.core.snapshots_refused) == (1, 2)
    led.show((A, [0], [1], 0))
    assert led.core.snapshots_used == 2


def pulled_away(led: Led) -> list[RolloutCommand]:
    """Instance A completes trajectory 0, which is trained, and still runs trajectory 1."""
    led.show((A, [], [], 0))
    led.do(BatchRequested())
    led.finish(0)
    led.do(GroupAdded(group=SampleGroupId(2), prompt_tokens=PROMPT))
    led.do(ParametersPushed(version=1))
    return led.show((A, [1], [], 1))


def test_a_pull_interrupts_what_runs_and_routes_it_when_it_has_arrived() -> None:
    """Version 0 is used up, and the initial trajectory 2 makes the pull worth it."""
    led = Led(groups=2)
    assert pulled_away(led) == [
        Interrupt(instance=A, trajectories=ids(1)),
        Pull(instance=A, version=1),
    ]
    assert led.show((A, [1], [], 1)) == [], "the commands have had no effect yet"
    returned = stopped(A, 1, tokens=7)
    assert led.do(returned) == [Route(instance=A, trajectories=ids(1, 2))], "the older one first"
    led.do(Pulled(instance=A, version=1))
    assert led.show((A, [1, 2], [], 0), version=1) == []
    assert led.core.snapshots_used == 3
    led.do(Generated(trajectory=TrajectoryId(1), instance=A, segments=segments(3, version=1)))
    record = led.core.trajectories.get(TrajectoryId(1))
    assert record is not None
    assert record.version == 0
    assert [each.policy_version for each in record.segments] == [0, 1]
    assert record.length == PROMPT + 7 + 3


def test_a_trajectory_that_completes_before_its_interrupt_is_not_routed_again() -> None:
    led = Led(groups=2)
    pulled_away(led)
    led.do(Generated(trajectory=TrajectoryId(1), instance=A, segments=segments(9)))
    assert led.do(stopped(A)) == []
    led.do(Pulled(instance=A, version=1))
    led.show((A, [2], [], 0), version=1)
    assert led.core.snapshots_used == 3


def test_what_waits_for_an_older_one_goes_when_that_one_has_ended() -> None:
    led = Led(groups=2)
    pulled_away(led)
    done = Generated(trajectory=TrajectoryId(1), instance=A, segments=segments(9))
    assert led.do(done) == [Route(instance=A, trajectories=ids(2))]


def test_what_waits_for_an_older_one_goes_when_that_one_is_dropped() -> None:
    led = Led(groups=2)
    pulled_away(led)
    assert led.do(GroupFiltered(group=SampleGroupId(1), reason="equal rewards")) == [
        ReportDroppedGroup(group=SampleGroupId(1), reason="equal rewards"),
        Route(instance=A, trajectories=ids(2)),
    ]


def test_what_waits_for_an_older_one_can_be_dropped_itself() -> None:
    led = Led(groups=2)
    pulled_away(led)
    led.do(GroupFiltered(group=SampleGroupId(2), reason="equal rewards"))
    assert led.do(stopped(A, 1)) == [Route(instance=A, trajectories=ids(1))]
    led.do(Pulled(instance=A, version=1))
    led.show((A, [1], [], 0), version=1)
    assert led.core.snapshots_used == 3


def test_what_was_on_its_way_to_a_lost_instance_goes_to_another() -> None:
    """Trajectory 2 has its version and its entry from the routing that nobody saw."""
    led = Led(groups=2)
    pulled_away(led)
    assert led.do(InstanceLost(instance=A)) == []
    led.do(InstanceJoined(instance=B, version=1, kv_budget=100))
    assert led.show((B, [], [], 0), version=1) == [Route(instance=B, trajectories=ids(1, 2))]


def test_an_instance_comes_back_under_its_id_with_commands_unanswered() -> None:
    """It was lost between an interrupt, a pull and the routes behind them, none of which it ran."""
    led = Led(groups=2)
    pulled_away(led)
    led.do(InstanceLost(instance=A))
    led.do(InstanceJoined(instance=A, version=0, kv_budget=100))
    with pytest.raises(InvalidRequestError, match="no unanswered"):
        led.do(stopped(A, 1))
    # Version 0 is used up for trajectory 2, which has version 1: only trajectory 1 may run.
    assert led.show((A, [], [], 0)) == [Route(instance=A, trajectories=ids(1))]
    led.finish(1)
    assert led.show((A, [], [], 1)) == [
        Pull(instance=A, version=1),
        Route(instance=A, trajectories=ids(2)),
    ]
    led.do(Pulled(instance=A, version=1))
    led.show((A, [2], [], 0), version=1)
    assert led.core.snapshots_refused == 0


def test_all_instances_are_lost_and_an_older_one_joins() -> None:
    led = Led(groups=2, instances=(A, B))
    led.show((A, [], [], 0), (B, [], [], 0))
    led.do(BatchRequested())
    led.finish(0)
    led.do(ParametersPushed(version=1))
    led.do(InstanceLost(instance=A))
    led.do(InstanceLost(instance=B))
    led.do(GroupAdded(group=SampleGroupId(2), prompt_tokens=PROMPT))
    assert led.do(SnapshotTaken(instances=())) == []
    c = InstanceId("c")
    led.do(InstanceJoined(instance=c, version=0, kv_budget=100))
    assert led.show((c, [], [], 0)) == [Route(instance=c, trajectories=ids(1))]
    assert led.show((c, [1], [], 0)) == [
        Interrupt(instance=c, trajectories=ids(1)),
        Pull(instance=c, version=1),
    ]
    assert led.do(stopped(c, 1)) == [Route(instance=c, trajectories=ids(1, 2))]


def test_an_instance_may_get_newer_parameters_than_it_was_told_to_pull() -> None:
    led = Led(groups=2)
    pulled_away(led)
    led.do(stopped(A, 1))
    led.finish(1, version=0)
    led.do(BatchRequested())
    led.do(ParametersPushed(version=2))
    led.do(Pulled(instance=A, version=2))
    led.show((A, [2], [], 1), version=2)
    assert led.core.snapshots_used == 3


def test_the_work_of_a_lost_instance_is_routed_to_another_one() -> None:
    led = Led(groups=2, instances=(A, B))
    led.show((A, [], [], 0), (B, [], [], 0))
    assert led.do(InstanceLost(instance=A)) == []
    late = Generated(trajectory=TrajectoryId(0), instance=A, segments=segments(5))
    assert led.do(late) == [], "a message of a lost instance"
    assert led.show((B, [1], [], 0)) == [Route(instance=B, trajectories=ids(0))]


def test_surplus_members_are_aborted_where_they_are() -> None:
    led = Led(groups=1, instances=(A, B), extra_samples=1)
    led.show((A, [], [], 0), (B, [], [], 0))
    held = led.core.trajectories.get(TrajectoryId(1))
    assert held is not None
    assert held.instance == B
    assert led.finish(0) == [Abort(instance=B, trajectories=ids(1))]
    assert led.show((A, [], [], 1), (B, [], [], 0)) == []
    assert led.core.snapshots_refused == 1, "the abort is not answered"
    led.do(stopped(B, 1))
    led.show((A, [], [], 1), (B, [], [], 0))
    assert led.core.snapshots_used == 2
    assert led.core.trajectories.get(TrajectoryId(1)) is None


def test_an_aborted_trajectory_that_was_complete_counts_as_completed() -> None:
    led = Led(groups=1, instances=(A, B), extra_samples=1)
    led.show((A, [], [], 0), (B, [], [], 0))
    led.finish(0)
    led.do(Generated(trajectory=TrajectoryId(1), instance=B, segments=segments(4)))
    led.do(stopped(B))
    led.show((A, [], [], 1), (B, [], [], 1))
    assert led.core.snapshots_used == 2


def test_a_filtered_group_makes_room_for_another() -> None:
    led = Led(groups=2)
    led.show((A, [], [], 0))
    led.finish(0)
    commands = led.do(GroupFiltered(group=SampleGroupId(0), reason="equal rewards"))
    assert commands == [ReportDroppedGroup(group=SampleGroupId(0), reason="equal rewards")]
    assert led.core.groups_wanted == 1
    assert led.do(GroupFiltered(group=SampleGroupId(0), reason="equal rewards")) == []
    led.do(Rewarded(trajectory=TrajectoryId(0), reward=1.0))


def test_a_failed_generation_is_tried_again_and_never_counted_with_a_reward() -> None:
    led = Led(groups=1, failures_max=2)
    assert led.show((A, [], [], 0)) == [Route(instance=A, trajectories=ids(0))]
    failed = GenerationFailed(trajectory=TrajectoryId(0), instance=A, reason="out of memory")
    assert led.do(failed) == []
    assert led.show((A, [], [], 0)) == [Route(instance=A, trajectories=ids(0))]
    assert led.do(failed) == [
        ReportDroppedGroup(
            group=SampleGroupId(0), reason="trajectory 0 failed 2 times: out of memory"
        )
    ]
    assert led.show((A, [], [], 0)) == []
    assert led.core.snapshots_refused == 0


def test_what_has_failed_is_generated_apart_from_the_rest() -> None:
    """A `Route` is one operation, which fails for all if one of them cannot be generated."""
    led = Led(groups=2, extra_samples=1)
    assert led.show((A, [], [], 0)) == [Route(instance=A, trajectories=ids(0, 1, 2, 3))]
    for each in ids(1, 2):
        led.do(GenerationFailed(trajectory=each, instance=A, reason="too long"))
    assert led.show((A, [0, 3], [], 0)) == [
        Route(instance=A, trajectories=ids(1)),
        Route(instance=A, trajectories=ids(2)),
    ]


def test_a_trajectory_that_fits_nowhere_is_reported_and_stops_nothing() -> None:
    led = Led(groups=0, failures_max=1)
    led.do(GroupAdded(group=SampleGroupId(0), prompt_tokens=1000))
    led.do(GroupAdded(group=SampleGroupId(1), prompt_tokens=PROMPT))
    assert led.show((A, [], [], 0)) == [Route(instance=A, trajectories=ids(0))]
    failed = GenerationFailed(trajectory=TrajectoryId(0), instance=A, reason="too long")
    assert led.do(failed) == [
        ReportDroppedGroup(group=SampleGroupId(0), reason="trajectory 0 failed 1 times: too long")
    ]
    assert led.show((A, [], [], 0)) == [Route(instance=A, trajectories=ids(1))]


def test_of_redistributed_work_only_what_others_take_leaves_its_instance() -> None:
    """What would come back keeps its KV cache."""
    led = Led(groups=2, extra_samples=2, throughput_ratio_max=2.0)
    assert led.show((A, [], [], 0)) == [Route(instance=A, trajectories=ids(0, 1, 2, 3, 4, 5))]
    led.do(InstanceJoined(instance=B, version=0, kv_budget=100))
    assert led.show((A, [0, 1, 2, 3, 4], [5], 0), (B, [], [], 0)) == [
        Interrupt(instance=A, trajectories=ids(1, 3, 5))
    ]
    assert led.do(stopped(A, 1, 3, 5)) == [Route(instance=B, trajectories=ids(1, 3, 5))]


def test_an_instance_that_does_not_answer_gets_no_work_and_attracts_none() -> None:
    led = Led(groups=2, extra_samples=2, throughput_ratio_max=2.0, instances=(A, B))
    assert led.show((A, [], [], 0), (B, [], [], 0), silent=(A, B)) == []
    assert led.show((A, [], [], 0), (B, [], [], 0), silent=(B,)) == [
        Route(instance=A, trajectories=ids(0, 1, 2, 3, 4, 5))
    ]
    busy = (A, [0, 1, 2, 3, 4], [5], 0)
    assert led.show(busy, (B, [], [], 0), silent=(B,)) == []
    assert led.show(busy, (B, [], [], 0)) == [Interrupt(instance=A, trajectories=ids(1, 3, 5))]


def test_no_more_groups_are_taken_than_the_bound_allows() -> None:
    led = Led(groups=2)
    assert led.core.groups_wanted == 0
    with pytest.raises(ConflictError, match="2 groups are in flight"):
        led.do(GroupAdded(group=SampleGroupId(2), prompt_tokens=PROMPT))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (GroupAdded(group=SampleGroupId(7), prompt_tokens=1), "add group 1"),
        (GroupAdded(group=SampleGroupId(1), prompt_tokens=0), "no tokens"),
        (InstanceJoined(instance=B, version=1, kv_budget=1), "report a version that was pushed"),
        (InstanceJoined(instance=B, version=0, kv_budget=0), "can run nothing"),
        (InstanceJoined(instance=A, version=0, kv_budget=1), "has joined already"),
        (ParametersPushed(version=1), "order of training"),
        (Pulled(instance=A, version=0), "was not told to pull"),
        (stopped(A), "no unanswered Interrupt or Abort"),
        (Rewarded(trajectory=TrajectoryId(9), reward=1.0), "no trajectory 9"),
        (Rewarded(trajectory=TrajectoryId(0), reward=1.0), "cannot reward"),
        (Rewarded(trajectory=TrajectoryId(0), reward=float("nan")), "GroupFiltered"),
        (GroupFiltered(group=SampleGroupId(5), reason=""), "no group 5"),
    ],
)
def test_an_event_against_the_protocol_changes_nothing(event: RolloutEvent, message: str) -> None:
    led = Led(groups=1)
    led.show((A, [], [], 0))
    with pytest.raises((InvalidRequestError, ConflictError), match=message):
        led.do(event)
    led.core.check_invariants()
    led.show((A, [0], [], 0))
    assert led.core.snapshots_used == 2


def test_tokens_older_than_the_version_of_a_trajectory_are_refused() -> None:
    """KV cache of an older version than V_traj breaks the bound as well."""
    led = Led(groups=2)
    pulled_away(led)
    led.do(stopped(A, 1))
    led.do(Pulled(instance=A, version=1))
    kept = (TrajectorySegment(tokens=3, policy_version=1, kv_version=0),)
    with pytest.raises(InvalidRequestError, match="over KV version 0"):
        led.do(Generated(trajectory=TrajectoryId(2), instance=A, segments=kept))
    record = led.core.trajectories.get(TrajectoryId(2))
    assert record is not None
    assert record.state is TrajectoryState.ROUTED
    # Trajectory 1 has version 0, so its tokens may attend to KV cache of version 0.
    led.do(Generated(trajectory=TrajectoryId(1), instance=A, segments=kept))


def test_an_instance_must_return_what_it_was_told_to_stop() -> None:
    led = Led(groups=2)
    pulled_away(led)
    with pytest.raises(InvalidRequestError, match="was to stop"):
        led.do(stopped(A))
    assert led.do(stopped(A, 1)) == [Route(instance=A, trajectories=ids(1, 2))]


def test_a_pull_interrupts_also_what_the_snapshot_does_not_show() -> None:
    """Trajectory 1 has completed on the instance, but its event has not arrived."""
    led = Led(groups=2)
    pulled_away_at = led.core.snapshots_used
    led.show((A, [], [], 0))
    led.do(BatchRequested())
    led.finish(0)
    led.do(GroupAdded(group=SampleGroupId(2), prompt_tokens=PROMPT))
    led.do(ParametersPushed(version=1))
    commands = led.show((A, [], [], 2))
    assert led.core.snapshots_used == pulled_away_at + 2
    assert commands[0] == Interrupt(instance=A, trajectories=ids(1))


def test_a_trajectory_that_failed_may_be_on_its_way_to_the_same_instance_again() -> None:
    """It is in two commands that stop it, of which it is in the second one only by now."""
    led = Led(groups=2)
    pulled_away(led)
    failed = GenerationFailed(trajectory=TrajectoryId(1), instance=A, reason="out of memory")
    assert led.do(failed) == [
        Route(instance=A, trajectories=ids(1)),
        Route(instance=A, trajectories=ids(2)),
    ]
    commands = led.do(GroupFiltered(group=SampleGroupId(1), reason="equal rewards"))
    assert commands[0] == Abort(instance=A, trajectories=ids(1))
    led.do(stopped(A))
    led.do(Pulled(instance=A, version=1))
    led.do(stopped(A, 1))
    led.show((A, [2], [], 0), version=1)
    assert led.core.snapshots_used == 3


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ((0.1 + 0.2, 0.3), True),
        ((1e9, 1e9 + 1), True),
        ((0.0, 0.0), True),
        ((0.0, 1e-5), False),
        ((1.0, 1.0, 0.0), False),
        ((-1.0, 1.0), False),
    ],
)
def test_rewards_that_differ_by_rounding_are_equal(rewards: tuple[float, ...], equal: bool) -> None:
    assert are_equal(rewards) is equal
