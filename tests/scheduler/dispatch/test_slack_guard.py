"""Members without exclusive slots keep out of the critical segments of members with some."""

import pytest

from plexrl.ids import DeploymentId
from plexrl.scheduler.dispatch.slack_guard import holds_back, next_critical_s
from plexrl.scheduler.placement.capacity.overlaps import (
    has_exclusive_slots,
    overlap_s,
    update_reservation,
)
from plexrl.scheduler.rules.hrrs import Candidate
from plexrl.scheduler.rules.switch_cost import round_trip_s
from plexrl.scheduler.state.demand.reservation import Reservation
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.operations import OperationKind
from tests.scheduler.dispatch.test_group_step import (
    cycle,
    finish_burst,
    known_cluster,
    on_the_trainers,
)
from tests.scheduler.fake_cluster import FakeCluster

HORIZON = 1200


def member(cluster: FakeCluster, job: str) -> Deployment:
    return cluster.core._context.state.deployments[DeploymentId(f"{job}/actor")]


def plan(cluster: FakeCluster, job: str, shift: float, busy_s: float = 20.0) -> None:
    """Update the member's reservation, as the end of a cycle does."""
    one = member(cluster, job)
    cluster.core._context.cluster.unmeasured.remove(one)
    one.demand.trace = DemandTrace(
        period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=busy_s),), cycles=3
    )
    update_reservation(cluster.core._context.cluster.capacity, one, shift)


def owners(cluster: FakeCluster) -> str:
    return "".join(job for job in "abc" if has_exclusive_slots(member(cluster, job)))


def guarded_cluster(compute_s: float = 0.1, **changes: object) -> FakeCluster:
    """`a` and `b` alternate and have exclusive slots; `c` was backfilled and has none."""
    cluster = known_cluster(compute_s, policy="pack", horizon_slots=HORIZON, **changes)
    # Packed onto one group, and from here on guarded.
    cluster.core._context.settings.policy.guards_slack = True
    plan(cluster, "a", 0.0)
    plan(cluster, "b", 50.0)
    member(cluster, "c").demand.estimates.observe_burst(1000.0, 0)
    assert owners(cluster) == "ab"
    return cluster


def test_while_a_guest_is_held_back_the_group_switches_to_the_critical_member() -> None:
    cluster = guarded_cluster()
    cycle(cluster, "a", 9)
    cluster.submit("c:9", "c/actor", "barrier")
    finish_burst(cluster, "a")
    # Not for the guest: `b` is expected next.
    assert on_the_trainers(cluster) == [("offload", "a/actor")]
    cluster.settle()
    (group,) = [g for g in cluster.core.list_groups(cluster.now) if g["shared"]]
    assert group["holder"] == "b/actor"
    assert cluster.state_of("c:9") == "pending"
    cycle(cluster, "b", 9)
    assert on_the_trainers(cluster) == [("optim_step", "b/actor")]


def test_a_guest_that_arrives_during_the_offload_does_not_get_critical_time() -> None:
    cluster = guarded_cluster()
    cycle(cluster, "a", 9)
    finish_burst(cluster, "a")
    cluster.submit("c:9", "c/actor", "barrier")
    cluster.execute(next(run for run in cluster.runs if run.kind.value == "offload"))
    assert on_the_trainers(cluster) == [("load", "b/actor")]


def test_a_starving_guest_starts() -> None:
    cluster = guarded_cluster()
    cycle(cluster, "a", 9)
    cluster.submit("c:9", "c/actor", "barrier")
    finish_burst(cluster, "a")
    cluster.settle()
    cluster.pass_time(cluster.config.starvation_bound_s)
    cluster.settle()
    assert cluster.state_of("c:9") == "finished"


def test_a_member_whose_plan_overlaps_is_a_guest_until_the_plans_separate() -> None:
    cluster = guarded_cluster()
    plan(cluster, "c", 80.0, busy_s=10.0)
    assert owners(cluster) == "abc"
    plan(cluster, "c", 55.0, busy_s=10.0)
    assert [
        overlap_s(cluster.core._context.cluster.capacity, member(cluster, job)) for job in "abc"
    ] == [
        0,
        0,
        10,
    ]
    # Who keeps to its plan keeps its time.
    assert owners(cluster) == "ab"
    plan(cluster, "b", 50.0)
    assert owners(cluster) == "a"
    plan(cluster, "c", 80.0, busy_s=10.0)
    assert owners(cluster) == "abc"


def test_a_guest_has_exclusive_slots_once_the_other_member_is_gone() -> None:
    cluster = guarded_cluster()
    plan(cluster, "c", 45.0, busy_s=10.0)
    assert owners(cluster) == "ab"
    cluster.send(ev.JobFinished(job="b", outcome="completed"))
    assert member(cluster, "c").placement.reservation == Reservation(
        shift=45.0, trace=member(cluster, "c").demand.trace
    )
    assert owners(cluster) == "ac"


def test_waiting_during_a_move_counts_as_waiting() -> None:
    cluster = FakeCluster(policy="spread", anticipation=False)
    for node in ("n0", "n1"):
        cluster.join_node(2, node)
    cluster.join_router()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.settle()
    cluster.submit("a:0", "a/actor", "optim_step")
    cluster.settle()
    (node,) = member(cluster, "a").wpg.stored.nodes or [
        member(cluster, "a").placement.ranks[0].node
    ]
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.send(ev.NodeDrainChanged(node=node, is_draining=True))
    while member(cluster, "a").wpg.moves.count == 0:
        cluster.execute(cluster.runs[0])
    assert member(cluster, "a").work.queue
    assert member(cluster, "a").demand.burst.wants_since == cluster.now


@pytest.mark.parametrize(("pause_s", "begins"), [(0.0, True), (1.0, False)])
def test_a_resident_guest_begins_no_burst_in_critical_time_and_goes_on_with_its_burst(
    pause_s: float, begins: bool
) -> None:
    cluster = guarded_cluster()
    policy = cluster.core._context.settings.policy
    cycle(cluster, "a", 9)
    finish_burst(cluster, "a")
    policy.guards_slack = False
    cluster.submit("c:8", "c/actor", "barrier")
    while cluster.state_of("c:8") != "finished":
        cluster.execute(cluster.runs[0])
    policy.guards_slack = True
    cluster.pass_time(pause_s)
    assert on_the_trainers(cluster) == []
    cluster.submit("c:9", "c/actor", "barrier")
    # `b` is expected, and the guest's burst would reach into its time.
    kind = "barrier" if begins else "offload"
    assert on_the_trainers(cluster) == [(kind, "c/actor")]


def guest_burst(cluster: FakeCluster, **fields: float) -> Candidate:
    return Candidate(name="c/actor", **{"arrived_at": cluster.now, "setup_s": 1.0, **fields})


def checked_after(cluster: FakeCluster, burst: Candidate) -> float | None:
    return holds_back(cluster.core.cluster, member(cluster, "c"), burst, cluster.now)


def expecting_cluster(**changes: object) -> tuple[FakeCluster, float]:
    """A member with exclusive slots is due after so many seconds; moves take 2 s."""
    cluster = guarded_cluster(compute_s=2.0, **changes)
    for job in ("a", "b"):
        cycle(cluster, job, 9)
        finish_burst(cluster, job)
        cluster.settle()
    state = cluster.core._context.state
    critical_s = next_critical_s(state, member(cluster, "c"), cluster.now)
    assert critical_s is not None
    assert critical_s > 20.0
    return cluster, critical_s


def test_a_guests_burst_and_the_switch_back_must_both_fit() -> None:
    cluster, critical_s = expecting_cluster()
    back_s = round_trip_s(cluster.core._context.state, member(cluster, "c"))
    assert back_s > 1.0
    fits = guest_burst(cluster, service_s=critical_s - back_s - 1.0 - 1e-6)
    late = guest_burst(cluster, service_s=critical_s - back_s - 1.0 + 1e-3)
    assert checked_after(cluster, fits) is None
    assert checked_after(cluster, late) is not None


def exactly_due_cluster(due_s: float) -> FakeCluster:
    """Members with exclusive slots are due after `due_s`, 64 s after their last bursts; the guest's
    moves take 4 s each."""
    cluster, _ = expecting_cluster()
    cluster.now = 8192.0
    for job in ("a", "b"):
        owner = member(cluster, job)
        owner.demand.estimates.think_seconds = 64.0
        owner.demand.burst.started_at, owner.demand.burst.ended_at = (
            None,
            cluster.now + due_s - 64.0,
        )
    moves = {OperationKind.OFFLOAD: 4.0, OperationKind.LOAD: 4.0}
    member(cluster, "c").demand.estimates.seconds_by_kind |= moves
    return cluster


@pytest.mark.parametrize(("service_s", "starts"), [(55.0, True), (55.001, False)])
def test_a_guest_starts_if_its_switch_back_ends_just_when_the_critical_segment_begins(
    service_s: float, starts: bool
) -> None:
    cluster = exactly_due_cluster(64.0)
    assert (checked_after(cluster, guest_burst(cluster, service_s=service_s)) is None) is starts


@pytest.mark.parametrize(("late_s", "is_expected"), [(32.0, True), (32.001, False)])
def test_a_member_that_is_late_by_half_its_pause_is_expected_and_after_that_no_longer(
    late_s: float, is_expected: bool
) -> None:
    cluster = exactly_due_cluster(-late_s)
    burst = guest_burst(cluster, service_s=1.0)
    assert (checked_after(cluster, burst) is not None) is is_expected


def test_a_guests_wait_ends_at_the_starvation_bound_counted_from_its_last_service() -> None:
    cluster, _ = expecting_cluster(starvation_ratio=1e9)
    bound_s = cluster.config.starvation_bound_s
    long = {"service_s": 1e6, "arrived_at": cluster.now - bound_s}
    assert checked_after(cluster, guest_burst(cluster, **long)) is None
    long["arrived_at"] += 0.5
    assert checked_after(cluster, guest_burst(cluster, **long)) == pytest.approx(0.5)
    long |= {"arrived_at": cluster.now - 2 * bound_s, "served_at": cluster.now - bound_s + 3.0}
    assert checked_after(cluster, guest_burst(cluster, **long)) == pytest.approx(3.0)


def test_a_checkpoint_of_its_stored_state_leaves_a_member_its_critical_segment() -> None:
    cluster = guarded_cluster()
    cycle(cluster, "a", 9)
    finish_burst(cluster, "a")
    cluster.settle()
    state = cluster.core._context.state
    due_s = next_critical_s(state, member(cluster, "b"), cluster.now)
    assert due_s is not None
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    assert [run.operation for run in cluster.runs] == ["a:save"]
    assert next_critical_s(state, member(cluster, "b"), cluster.now) == due_s
