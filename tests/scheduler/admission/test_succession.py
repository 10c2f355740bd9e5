"""A gang that takes the place of a running job keeps no free GPUs from others while it waits."""

import pytest

from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.choice.scarcity import is_scarce
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster


def trace(busy_s: float) -> DemandTrace:
    segment = Segment(offset_s=0.0, duration_s=busy_s)
    return DemandTrace(period_s=100.0, segments=(segment,))


def submit(
    cluster: FakeCluster,
    job: str,
    *,
    busy_s: float = 50.0,
    rollout_gpus: int = 2,
    expected_s: float = 0.0,
) -> None:
    """A job that trains on four GPUs and generates on others."""
    cluster.job(job, gang=2, expected_s=expected_s)
    cluster.deploy(f"{job}/actor", workers=4, trace=trace(busy_s))
    cluster.deploy(f"{job}/rollout", workers=rollout_gpus, exclusive=True)


def waiting(cluster: FakeCluster) -> list[str]:
    return sorted({name.split("/")[0] for name in cluster.core._context.cluster.queues.waiting})


def behind_a_full_group(policy: str, *, busy_s: float = 50.0, rollout_gpus: int = 2) -> FakeCluster:
    """Two of eight GPUs are free, and the job `first` has waited for too long."""
    cluster = FakeCluster(policy=policy, reservations=False)
    cluster.start_node(8)
    submit(cluster, "runs")
    submit(cluster, "first", busy_s=busy_s, rollout_gpus=rollout_gpus)
    cluster.pass_time(cluster.config.starvation_bound_s)
    cluster.job("small")
    cluster.deploy("small/actor", workers=1, trace=trace(20.0))
    return cluster


@pytest.mark.parametrize("policy", ["pack", "spread+backfill", "co-execution"])
def test_others_take_free_gpus_and_the_first_takes_the_place_of_a_job_of_its_sizes(
    policy: str,
) -> None:
    cluster = behind_a_full_group(policy)
    assert waiting(cluster) == ["first"]
    submit(cluster, "second")
    cluster.send(ev.JobFinished(job="runs", outcome="completed"))
    assert waiting(cluster) == ["second"]


@pytest.mark.parametrize("policy", ["isolated", "spread"])
def test_a_policy_without_sharing_or_backfilling_keeps_free_gpus_for_it(policy: str) -> None:
    assert waiting(behind_a_full_group(policy)) == ["first", "small"]


@pytest.mark.parametrize(("busy_s", "rollout_gpus"), [(80.0, 2), (50.0, 3)])
def test_no_job_that_runs_leaves_a_place_for_a_longer_burst_or_other_rollouts(
    busy_s: float, rollout_gpus: int
) -> None:
    cluster = behind_a_full_group("spread+backfill", busy_s=busy_s, rollout_gpus=rollout_gpus)
    assert waiting(cluster) == ["first", "small"]


@pytest.mark.parametrize(("runs_s", "is_kept"), [(1e6, True), (1000.0, False)])
def test_a_place_that_comes_later_than_gpus_of_its_own_does_not_count(
    runs_s: float, is_kept: bool
) -> None:
    cluster = FakeCluster(policy="spread+backfill")
    cluster.start_node(12)
    submit(cluster, "runs", expected_s=runs_s)
    for number in range(6):
        cluster.job(f"short{number}", expected_s=1000.0)
        cluster.deploy(f"short{number}/actor", workers=1, exclusive=True)
    submit(cluster, "first", expected_s=1000.0)
    cluster.pass_time(cluster.config.starvation_bound_s)
    cluster.send(ev.JobFinished(job="short0", outcome="completed"))
    cluster.job("small", expected_s=1e5)
    cluster.deploy("small/actor", workers=1, exclusive=True)
    assert waiting(cluster) == (["first", "small"] if is_kept else ["first"])


def test_a_small_group_delays_no_job_that_needs_many_more_gpus() -> None:
    cluster = FakeCluster(policy="spread+backfill", reservations=False)
    cluster.start_node(12)
    for job, workers in (("one", 1), ("two", 2), ("large", 12)):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=workers)
    context = cluster.core._context
    one, two = (context.state.deployment(DeploymentId(f"{job}/actor")) for job in ("one", "two"))
    assert not is_scarce(context.cluster, one)
    assert is_scarce(context.cluster, two)


def both_share(cluster: FakeCluster, job: str, *, generates_s: float) -> None:
    """A job whose rollout shares its GPUs, too, and is too busy for two on one group."""
    cluster.job(job, gang=2)
    cluster.deploy(f"{job}/actor", workers=4, trace=trace(50.0))
    cluster.deploy(f"{job}/rollout", "rollout", 2, trace=trace(generates_s), shares=True)


@pytest.mark.parametrize(("generates_s", "passes"), [(70.0, True), (89.0, False)])
def test_a_job_takes_the_places_of_two_deployments_that_share(
    generates_s: float, passes: bool
) -> None:
    cluster = FakeCluster(policy="spread+backfill", reservations=False)
    cluster.start_node(7)
    both_share(cluster, "runs", generates_s=70.0)
    both_share(cluster, "first", generates_s=generates_s)
    cluster.pass_time(cluster.config.starvation_bound_s)
    cluster.job("small")
    cluster.deploy("small/actor", workers=1, trace=trace(20.0))
    assert waiting(cluster) == (["first"] if passes else ["first", "small"])
    cluster.send(ev.JobFinished(job="runs", outcome="completed"))
    assert "first" not in waiting(cluster)
