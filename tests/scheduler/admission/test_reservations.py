"""The first job that starves has a reservation, which jobs behind it do not delay."""

import heapq
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId
from plexrl.scheduler.admission.queues.reservations import RENEWALS_MAX
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.queries.explain_placement import blocking_heads
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster, Quick

BOUND_S = 600.0


def submit(cluster: FakeCluster, job: str, workers: int, expected_s: float) -> None:
    """A job of one trainer that shares with nobody."""
    cluster.job(job, expected_s=expected_s)
    cluster.deploy(f"{job}/a", workers=workers, exclusive=True)


def has_gpus(cluster: FakeCluster, job: str) -> bool:
    return (
        cluster.core._context.state.deployments[DeploymentId(f"{job}/a")].placement.group
        is not None
    )


def reserved_at(cluster: FakeCluster, job: str) -> float:
    return cluster.core._context.state.reservations[DeploymentId(f"{job}/a")].at


def behind_a_large_job(gpus: int, **changes: object) -> FakeCluster:
    """One of four or more GPUs is free, and the first job in the queue starves for four; the
    running job ends 3000 s after its start."""
    cluster = FakeCluster(policy="isolated", **changes)
    cluster.start_node(gpus)
    submit(cluster, "running", gpus - 1, 3000.0)
    submit(cluster, "large", 4, 3000.0)
    cluster.pass_time(BOUND_S)
    return cluster


def test_a_job_that_ends_before_the_reservation_runs_and_a_longer_one_waits() -> None:
    cluster = behind_a_large_job(4)
    began_at = cluster.now - BOUND_S
    submit(cluster, "long", 1, 2401.0)
    assert reserved_at(cluster, "large") == began_at + 3000.0
    submit(cluster, "short", 1, 2400.0)
    assert (has_gpus(cluster, "short"), has_gpus(cluster, "long")) == (True, False)
    cluster.send(ev.JobFinished(job="short", outcome="completed"))
    assert not has_gpus(cluster, "long")
    text = str(cluster.core.explain_job("long", cluster.now))
    assert "reserved for 2400 s more for large/a" in text
    text = str(cluster.core.explain_job("large", cluster.now))
    assert "it has a reservation: it gets GPUs in 2400 s" in text


def test_a_long_job_runs_on_gpus_that_the_reservation_leaves() -> None:
    cluster = behind_a_large_job(5)
    submit(cluster, "long", 1, 1e6)
    assert has_gpus(cluster, "long")


def test_without_reservations_free_gpus_are_left_to_the_starving_job() -> None:
    cluster = behind_a_large_job(5, reservations=False)
    submit(cluster, "short", 1, 10.0)
    assert not has_gpus(cluster, "short")
    (head,) = blocking_heads(cluster.core.cluster, cluster.now)
    assert (head["deployment"], head["free_gpus"]) == ("large/a", 1)


def test_without_a_starving_job_nobody_has_a_reservation() -> None:
    cluster = behind_a_large_job(4, starvation_bound_s=1e9)
    submit(cluster, "long", 1, 1e6)
    assert has_gpus(cluster, "long")
    assert not cluster.core._context.state.reservations


def test_a_reservation_whose_time_comes_too_often_keeps_all_gpus_for_its_job() -> None:
    cluster = behind_a_large_job(4)
    for number in range(RENEWALS_MAX + 1):
        submit(cluster, f"short{number}", 1, 10.0)
        assert has_gpus(cluster, f"short{number}")
        cluster.send(ev.JobFinished(job=f"short{number}", outcome="completed"))
        assert blocking_heads(cluster.core.cluster, cluster.now) == []
        cluster.pass_time(reserved_at(cluster, "large") - cluster.now + 1.0)
    submit(cluster, "late", 1, 10.0)
    assert not has_gpus(cluster, "late")
    (head,) = blocking_heads(cluster.core.cluster, cluster.now)
    assert (head["deployment"], head["workers"], head["free_gpus"]) == ("large/a", 4, 1)
    assert head["since"] == reserved_at(cluster, "large")
    assert "no other job that waits may take the 1 free" in str(
        cluster.core.explain_job("large", cluster.now)
    )
    cluster.send(ev.JobFinished(job="running", outcome="completed"))
    assert has_gpus(cluster, "large")
    assert not cluster.core._context.state.reservations
    assert blocking_heads(cluster.core.cluster, cluster.now) == []


def test_a_cancelled_job_leaves_no_reservation() -> None:
    cluster = behind_a_large_job(4)
    submit(cluster, "long", 1, 1e6)
    cluster.send(ev.JobFinished(job="large", outcome="cancelled"))
    assert has_gpus(cluster, "long")
    assert not cluster.core._context.state.reservations


def make_cycle(cluster: FakeCluster, job: str, number: int, length_s: float) -> None:
    """A training cycle of this length; each of its operations takes a second."""
    ends_at = cluster.now + length_s
    for kind in ("forward_backward", "optim_step"):
        cluster.submit(f"{job}/{kind}{number}", f"{job}/a", kind)
    while cluster.launches:
        cluster.launch(cluster.launches[0])
    while cluster.runs:
        cluster.pass_time(1.0)
        cluster.execute(cluster.runs[0])
    cluster.pass_time(ends_at - cluster.now)


def start_training(
    gpus: int, expected_s: float, bound_s: float = BOUND_S, **fields: object
) -> FakeCluster:
    """A job of this length has all GPUs but one."""
    cluster = FakeCluster(policy="isolated", starvation_bound_s=bound_s)
    cluster.start_node(gpus)
    cluster.job("running", expected_s=expected_s)
    cluster.deploy("running/a", workers=gpus - 1, **fields)
    return cluster


def declared(period_s: float) -> DemandTrace:
    """Busy for a fifth of its cycle."""
    segments = (Segment(offset_s=0.0, duration_s=period_s / 5),)
    return DemandTrace(period_s=period_s, segments=segments)


def test_cycles_that_are_left_take_as_long_as_the_newest_ones() -> None:
    cluster = start_training(4, expected_s=3000.0, trace=declared(100.0))
    for number in range(10):
        make_cycle(cluster, "running", number, 200.0)
    submit(cluster, "large", 4, 3000.0)
    began_at = cluster.now
    # Cycle 10 of 30 begins; by its length the job would end in 1000 s.
    make_cycle(cluster, "running", 10, BOUND_S)
    submit(cluster, "short", 1, 3300.0)
    assert reserved_at(cluster, "large") == pytest.approx(began_at + 1.5 * BOUND_S + 19 * 200.0)
    assert has_gpus(cluster, "short")
    submit(cluster, "long", 1, 5000.0)
    assert not has_gpus(cluster, "long")


def test_a_job_that_is_ahead_of_its_length_ends_earlier() -> None:
    cluster = start_training(4, expected_s=3000.0, bound_s=0.0, trace=declared(100.0))
    for number in range(20):
        make_cycle(cluster, "running", number, 50.0)
    submit(cluster, "large", 4, 3000.0)
    submit(cluster, "short", 1, 10.0)
    # Of 30 cycles 19 have ended, and number 19 is about to.
    assert reserved_at(cluster, "large") == pytest.approx(cluster.now + 10 * 50.0)


def test_a_job_with_more_cycles_than_expected_counts_by_its_length() -> None:
    cluster = start_training(4, expected_s=1000.0, bound_s=0.0, trace=declared(100.0))
    began_at = cluster.now
    for number in range(15):
        make_cycle(cluster, "running", number, 50.0)
    submit(cluster, "large", 4, 3000.0)
    submit(cluster, "short", 1, 10.0)
    assert reserved_at(cluster, "large") == pytest.approx(began_at + 1000.0)


def test_the_number_of_cycles_follows_from_the_first_profile() -> None:
    cluster = start_training(4, expected_s=4000.0)
    for number in range(10):
        make_cycle(cluster, "running", number, 100.0)
    deployment = cluster.core._context.state.deployments[DeploymentId("running/a")]
    assert deployment.demand.trace is not None
    assert deployment.demand.trace.cycles
    for number in range(10, 16):
        make_cycle(cluster, "running", number, 300.0)
    assert deployment.demand.cycles.expected == pytest.approx(40.0, rel=0.02)
    assert deployment.demand.trace.period_s == pytest.approx(300.0, rel=0.02)


def test_a_displaced_job_passes_a_reservation_by_the_time_that_is_left_of_it() -> None:
    cluster = FakeCluster(policy="isolated", starvation_bound_s=BOUND_S)
    cluster.join_node(4, node_type="large")
    cluster.join_router()
    submit(cluster, "running", 3, 3000.0)
    submit(cluster, "first", 1, 10.0)
    began_at = cluster.now
    cluster.job("large", expected_s=3000.0)
    cluster.deploy("large/a", workers=4, exclusive=True, node_type="large")
    cluster.join_node(1, node="lost", node_type="small")
    submit(cluster, "moved", 1, 3000.0)
    cluster.send(ev.JobFinished(job="first", outcome="completed"))
    cluster.pass_time(2000.0)
    submit(cluster, "long", 1, 1001.0)
    assert not has_gpus(cluster, "long")
    assert reserved_at(cluster, "large") == began_at + 3000.0
    cluster.lose_node("lost")
    cluster.pass_time(200.0)
    ranks = cluster.core.deployment_view("moved/a", cluster.now)["ranks"]
    assert [rank["node"] for rank in ranks] == ["n"]


JOBS = st.lists(
    st.tuples(st.integers(1, 8), st.integers(1, 40), st.sampled_from((0, 1, 5))),
    min_size=2,
    max_size=25,
)


@settings(max_examples=examples(30), deadline=None)
@given(JOBS, st.sampled_from((0.0, 300.0, 3000.0)), st.booleans())
def test_no_reservation_is_missed_where_all_jobs_end_by_their_expected_lengths(
    wanted: list[tuple[int, int, int]], bound_s: float, is_restored: bool
) -> None:
    cluster = Quick(Random(1), 0.1, policy="isolated", starvation_bound_s=bound_s)
    cluster.start_node(8)
    ends: list[tuple[float, str]] = []
    started: dict[str, float] = {}
    promised: dict[str, float] = {}
    lengths = {f"j{number}": 100.0 * length for number, (_, length, _) in enumerate(wanted)}

    def look() -> None:
        state = cluster.core._context.state
        for name, reserved in state.reservations.items():
            promised.setdefault(state.deployments[name].job, reserved.at)
        for job, expected_s in lengths.items():
            if job not in started and f"{job}/a" in state.deployments and has_gpus(cluster, job):
                started[job] = cluster.now
                heapq.heappush(ends, (cluster.now + expected_s, job))

    def advance(until: float) -> None:
        while ends and ends[0][0] <= until:
            at, job = heapq.heappop(ends)
            cluster.now = max(cluster.now, at)
            if is_restored:
                cluster.core = SchedulerCore.restore(cluster.config, cluster.core.dump())
            cluster.send(ev.JobFinished(job=job, outcome="completed"))
            look()
        cluster.now = max(cluster.now, until)

    for number, (workers, _, pause) in enumerate(wanted):
        submit(cluster, f"j{number}", workers, lengths[f"j{number}"])
        look()
        advance(cluster.now + 100.0 * pause)
    while ends:
        advance(ends[0][0])
    assert started.keys() == lengths.keys(), "some job waits for ever"
    for job, at in promised.items():
        assert started[job] <= at, f"{job} has started {started[job] - at} s late"
