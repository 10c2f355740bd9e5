"""An idle group is switched to the member that is expected next."""

import pytest

from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from tests.scheduler.fake_cluster import FakeCluster


def cycle(cluster: FakeCluster, job: str, number: int) -> None:
    """A burst of `job`, up to the publish that ends it."""
    cluster.submit(f"{job}:{number}", f"{job}/actor", "optim_step")
    cluster.submit(f"{job}:{number}s", f"{job}/rollout", "sync_weights", source=f"{job}/actor")


def finish_burst(cluster: FakeCluster, job: str) -> None:
    """Carry out what runs on the job's trainer until its publish is done."""
    for _ in range(20):
        run = next(run for run in cluster.runs if run.deployment.endswith("/actor"))
        cluster.execute(run)
        if run.deployment == f"{job}/actor" and run.kind.value == "publish":
            return
    raise AssertionError(f"{job} never publishes")


def on_the_trainers(cluster: FakeCluster) -> list[tuple[str, str]]:
    runs = [run for run in cluster.runs if run.deployment.endswith("/actor")]
    return [(run.kind.value, run.deployment) for run in runs]


def known_cluster(compute_s: float = 0.1, **changes: object) -> FakeCluster:
    """`a` and `b` take turns; the pauses between their bursts are known. `c` has run once. Each
    operation and move takes `compute_s` by its report."""
    cluster = FakeCluster(**changes)
    cluster.compute_s = compute_s
    cluster.start_node()
    for job in ("a", "b", "c"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    for job in ("a", "b"):
        cluster.deploy(f"{job}/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("c:0", "c/actor", "barrier")
    cluster.settle()
    for number in range(3):
        for job in ("a", "b"):
            cycle(cluster, job, number)
            cluster.settle()
            cluster.pass_time(50.0)
    return cluster


def test_the_member_expected_first_is_loaded_before_it_asks() -> None:
    cluster = known_cluster()
    cycle(cluster, "a", 9)
    finish_burst(cluster, "a")
    assert on_the_trainers(cluster) == [("offload", "a/actor")]
    cluster.settle()
    (group,) = [g for g in cluster.core.list_groups(cluster.now) if g["shared"]]
    assert (group["holder"], group["phase"]) == ("b/actor", "hold")
    cycle(cluster, "b", 9)
    assert on_the_trainers(cluster) == [("optim_step", "b/actor")]


@pytest.mark.parametrize("is_declared", [True, False])
def test_declared_demand_says_when_a_member_is_first_expected_again(is_declared: bool) -> None:
    segments = (Segment(offset_s=0.0, duration_s=20.0),)
    demand = DemandTrace(period_s=100.0, segments=segments) if is_declared else None
    cluster = FakeCluster()
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", trace=demand)
        cluster.deploy(f"{job}/rollout", "rollout", workers=1)
    cluster.settle()
    cycle(cluster, "a", 0)
    cluster.settle()
    cycle(cluster, "b", 0)
    finish_burst(cluster, "b")
    # Neither has paused between two bursts yet.
    assert on_the_trainers(cluster) == ([("offload", "b/actor")] if is_declared else [])


def test_who_comes_during_the_offload_is_handed_the_group() -> None:
    cluster = known_cluster()
    cycle(cluster, "a", 9)
    finish_burst(cluster, "a")
    cluster.submit("c:9", "c/actor", "barrier")
    assert cluster.explanation_of("c:9")["rule"] == "switch"
    cluster.execute(next(run for run in cluster.runs if run.kind.value == "offload"))
    assert on_the_trainers(cluster) == [("load", "c/actor")]


def test_who_comes_when_another_is_expected_need_not_wait_for_it() -> None:
    cluster = known_cluster()
    cycle(cluster, "a", 9)
    finish_burst(cluster, "a")
    cluster.settle()
    cluster.submit("c:9", "c/actor", "barrier")
    assert on_the_trainers(cluster) == [("offload", "b/actor")]


def test_a_member_that_has_stopped_is_not_expected_for_ever() -> None:
    cluster = known_cluster()
    cluster.pass_time(10_000.0)
    cycle(cluster, "a", 9)
    finish_burst(cluster, "a")
    assert on_the_trainers(cluster) == []


@pytest.mark.parametrize("changes", [{"anticipation": False}, {"ordering": "fifo-bursts"}])
def test_without_anticipation_the_holder_stays(changes: dict[str, object]) -> None:
    cluster = known_cluster(**changes)
    cycle(cluster, "a", 9)
    finish_burst(cluster, "a")
    assert on_the_trainers(cluster) == []


@pytest.mark.parametrize("is_said", [True, False])
def test_a_job_without_rollouts_here_says_itself_that_its_burst_is_over(is_said: bool) -> None:
    cluster = FakeCluster()
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    for number in range(3):
        for job in ("a", "b"):
            name = f"{job}:{number}"
            cluster.submit(name, f"{job}/actor", "optim_step", ends_burst=is_said)
            cluster.settle()
            cluster.pass_time(50.0)
    # The last to work was b; that a is next is seen at once or not at all.
    (group,) = [g for g in cluster.core.list_groups(cluster.now) if g["shared"]]
    assert group["holder"] == ("a/actor" if is_said else "b/actor")
