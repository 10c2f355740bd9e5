"""How long a group stays closed to others while a member has no profile."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

BOUND_S = 600.0
PROFILE = DemandTrace(period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=20.0),))


def cluster_of(**changes: object) -> FakeCluster:
    cluster = FakeCluster(policy="spread+backfill", starvation_bound_s=BOUND_S, **changes)
    cluster.start_node(2)
    return cluster


def submit(cluster: FakeCluster, job: str, demand: DemandTrace | None = None) -> None:
    cluster.job(job)
    cluster.deploy(f"{job}/actor", workers=2, trace=demand)


def group_of(cluster: FakeCluster, job: str) -> object:
    return cluster.core.job_view(job, cluster.now)["deployments"][0]["group"]


def train(cluster: FakeCluster, job: str, length_s: float) -> None:
    """One cycle of a second of work and a pause."""
    cluster.submit(f"{job}:{cluster.now}", f"{job}/actor", "optim_step")
    while cluster.launches:
        cluster.launch(cluster.launches[0])
    while cluster.runs:
        cluster.pass_time(1.0)
        cluster.execute(cluster.runs[0])
    cluster.pass_time(length_s)


@pytest.mark.parametrize("demand", [None, PROFILE])
@pytest.mark.parametrize("restored", [False, True])
def test_a_member_without_cycles_does_not_keep_its_group_closed(
    demand: DemandTrace | None, restored: bool
) -> None:
    cluster = cluster_of()
    submit(cluster, "idle")
    submit(cluster, "b", demand)
    cluster.pass_time(BOUND_S - 1.0)
    assert group_of(cluster, "b") is None
    if restored:
        cluster.restart_scheduler(restored=True)
    cluster.pass_time(2.0)
    assert group_of(cluster, "b") == group_of(cluster, "idle")


def test_a_member_that_trains_is_profiled_alone() -> None:
    cluster = cluster_of()
    submit(cluster, "a")
    submit(cluster, "b")
    for _ in range(2):
        assert group_of(cluster, "b") is None
        train(cluster, "a", 0.8 * BOUND_S)
    train(cluster, "a", 1.0)
    assert group_of(cluster, "b") == group_of(cluster, "a")


def test_a_member_whose_cycles_give_no_profile_is_not_awaited_for_ever() -> None:
    cluster = cluster_of(profile_cycles=1 << 20, learns_from_jobs=False)
    submit(cluster, "a")
    submit(cluster, "b")
    for _ in range(2):
        train(cluster, "a", 0.8 * BOUND_S)
    assert group_of(cluster, "b") is None
    cluster.pass_time(BOUND_S)
    assert group_of(cluster, "b") == group_of(cluster, "a")


def test_the_bound_begins_again_with_a_new_member() -> None:
    cluster = cluster_of()
    submit(cluster, "a")
    cluster.pass_time(BOUND_S + 1.0)
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    submit(cluster, "b")
    submit(cluster, "c")
    cluster.pass_time(BOUND_S - 1.0)
    assert group_of(cluster, "c") is None
    cluster.pass_time(2.0)
    assert group_of(cluster, "c") == group_of(cluster, "b")


@settings(max_examples=examples(25), deadline=None)
@given(pauses=st.lists(st.sampled_from((1.0, 100.0, 550.0, 700.0)), max_size=8))
def test_a_group_opens_with_a_profile_or_after_the_bound_and_never_before(
    pauses: list[float],
) -> None:
    cluster = cluster_of(cold_start_patience_s=0.0)
    submit(cluster, "a")
    # Of another shape: its demand is not expected to be that of the first one.
    cluster.job("b")
    cluster.deploy("b/actor", workers=2, state_bytes=2000)
    began, closed = cluster.now, True
    for done, pause in enumerate(pauses):
        # The first cycle is the warm-up; the third submission ends the first measured one.
        began = cluster.now
        train(cluster, "a", pause)
        if done >= 2 or pause > BOUND_S:
            closed = False
        assert (group_of(cluster, "b") is None) == closed, f"after {pauses[: done + 1]}"
        if not closed:
            return
    cluster.pass_time(began + BOUND_S + 2.0 - cluster.now)
    assert group_of(cluster, "b") == group_of(cluster, "a")
