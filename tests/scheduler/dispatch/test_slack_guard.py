"""Members without exclusive slots keep out of the critical segments of members with some."""

from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.capacity.overlaps import (
    has_exclusive_slots,
    overlap_s,
    update_reservation,
)
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.records import Deployment, Reservation
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
    one.trace = DemandTrace(
        period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=busy_s),), cycles=3
    )
    update_reservation(cluster.core._context.cluster, one, shift)


def owners(cluster: FakeCluster) -> str:
    return "".join(job for job in "abc" if has_exclusive_slots(member(cluster, job)))


def guarded_cluster() -> FakeCluster:
    """`a` and `b` alternate and have exclusive slots; `c` was backfilled and has none."""
    cluster = known_cluster(policy="pack", horizon_slots=HORIZON)
    # Packed onto one group, and from here on guarded.
    cluster.core._context.settings.policy.guards_slack = True
    plan(cluster, "a", 0.0)
    plan(cluster, "b", 50.0)
    member(cluster, "c").estimates.observe_burst(1000.0, 0)
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
    assert [overlap_s(cluster.core._context.cluster, member(cluster, job)) for job in "abc"] == [
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
    assert member(cluster, "c").reservation == Reservation(
        shift=45.0, trace=member(cluster, "c").trace
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
    (node,) = member(cluster, "a").stored.nodes or [member(cluster, "a").ranks[0].node]
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.send(ev.NodeDrainChanged(node=node, is_draining=True))
    while member(cluster, "a").moves.count == 0:
        cluster.execute(cluster.runs[0])
    assert member(cluster, "a").queue
    assert member(cluster, "a").burst.wants_since == cluster.now
