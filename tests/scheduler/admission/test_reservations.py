"""The first job that starves has a reservation, which jobs behind it do not delay."""

import heapq
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId
from plexrl.scheduler.admission.queues.reservations import RENEWALS_MAX
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster, Quick

BOUND_S = 600.0


def submit(cluster: FakeCluster, job: str, workers: int, expected_s: float) -> None:
    """A job of one trainer that shares with nobody."""
    cluster.job(job, expected_s=expected_s)
    cluster.deploy(f"{job}/a", workers=workers, exclusive=True)


def has_gpus(cluster: FakeCluster, job: str) -> bool:
    return cluster.core._context.state.deployments[DeploymentId(f"{job}/a")].group is not None


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
    (head,) = cluster.core.blocking_heads(cluster.now)
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
        assert cluster.core.blocking_heads(cluster.now) == []
        cluster.pass_time(reserved_at(cluster, "large") - cluster.now + 1.0)
    submit(cluster, "late", 1, 10.0)
    assert not has_gpus(cluster, "late")
    (head,) = cluster.core.blocking_heads(cluster.now)
    assert (head["deployment"], head["workers"], head["free_gpus"]) == ("large/a", 4, 1)
    assert head["since"] == reserved_at(cluster, "large")
    assert "no other job that waits may take the 1 free" in str(
        cluster.core.explain_job("large", cluster.now)
    )
    cluster.send(ev.JobFinished(job="running", outcome="completed"))
    assert has_gpus(cluster, "large")
    assert not cluster.core._context.state.reservations
    assert cluster.core.blocking_heads(cluster.now) == []


def test_a_cancelled_job_leaves_no_reservation() -> None:
    cluster = behind_a_large_job(4)
    submit(cluster, "long", 1, 1e6)
    cluster.send(ev.JobFinished(job="large", outcome="cancelled"))
    assert has_gpus(cluster, "long")
    assert not cluster.core._context.state.reservations


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
