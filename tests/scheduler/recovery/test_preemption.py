"""Detached jobs give their GPUs to waiting jobs, and lose nothing."""

import pytest

from plexrl.scheduler.rules.policies import POLICIES
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster


def crowded(policy: str = "isolated") -> FakeCluster:
    """Job `a` has all GPUs, job `b` waits for some."""
    cluster = FakeCluster(policy=policy)
    cluster.join_node(4, "n1")
    cluster.join_router()
    cluster.job("a")
    cluster.deploy("a/actor", "rollout", workers=4)
    cluster.settle()
    cluster.job("b")
    cluster.deploy("b/actor", "rollout", workers=2)
    return cluster


def placed(cluster: FakeCluster) -> list[str]:
    deployments = cluster.core._context.state.deployments.values()
    return sorted(each.deployment for each in deployments if each.placement.group is not None)


def detach(cluster: FakeCluster, job: str) -> None:
    cluster.send(ev.JobFinished(job=job, outcome="detached"))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_detached_job_gives_its_gpus_back_and_gets_them_again_when_it_is_attached(
    policy: str,
) -> None:
    cluster = crowded(policy)
    assert placed(cluster) == ["a/actor"]
    detach(cluster, "a")
    assert placed(cluster) == ["b/actor"]
    cluster.settle()
    assert cluster.core.job_view("a", cluster.now)["attached"] is False
    cluster.send(ev.ControllerAttached(job="a", controller="new"))
    assert placed(cluster) == ["b/actor"]
    cluster.send(ev.JobFinished(job="b", outcome="completed"))
    cluster.settle()
    assert placed(cluster) == ["a/actor"]
    assert cluster.core.deployment_view("a/actor", cluster.now)["state"] == "ready"


def test_a_detached_job_keeps_its_gpus_while_no_job_waits() -> None:
    cluster = crowded()
    cluster.send(ev.JobFinished(job="b", outcome="completed"))
    detach(cluster, "a")
    cluster.settle()
    assert placed(cluster) == ["a/actor"]


def test_operations_of_a_detached_job_run_before_it_is_set_aside() -> None:
    cluster = crowded()
    cluster.submit("o", "a/actor", "generate")
    detach(cluster, "a")
    assert placed(cluster) == ["a/actor"]
    cluster.settle()
    cluster.pass_time(10.0)
    cluster.settle()
    assert placed(cluster) == ["b/actor"]


def test_a_job_set_aside_does_not_take_free_gpus_by_itself() -> None:
    cluster = crowded()
    detach(cluster, "a")
    cluster.send(ev.JobFinished(job="b", outcome="completed"))
    cluster.settle()
    assert placed(cluster) == []
    story = cluster.core.explain_job("a", cluster.now)
    assert "no controller" in str(story)


def test_no_more_detached_jobs_are_set_aside_than_needed() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.join_node(4, "n1")
    cluster.join_router()
    for job in ("first", "second"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", "rollout", workers=2)
        cluster.settle()
        detach(cluster, job)
        cluster.pass_time(1.0)
    cluster.job("new")
    cluster.deploy("new/actor", "rollout", workers=2)
    assert placed(cluster) == ["new/actor", "second/actor"]


def test_a_detached_job_is_not_set_aside_for_another_detached_one() -> None:
    cluster = crowded()
    detach(cluster, "b")
    detach(cluster, "a")
    assert placed(cluster) == ["a/actor"]
    cluster.job("c")
    cluster.deploy("c/actor", "rollout", workers=4)
    assert placed(cluster) == ["c/actor"]


def test_a_silent_controller_counts_as_gone_after_its_timeout() -> None:
    cluster = crowded()
    cluster.pass_time(9e5)
    cluster.send(ev.ControllerSeen(job="b"))
    assert placed(cluster) == ["a/actor"]
    cluster.pass_time(2e5)
    assert placed(cluster) == ["b/actor"]


def test_a_job_set_aside_is_in_no_queue_after_a_restart() -> None:
    cluster = crowded()
    detach(cluster, "a")
    cluster.settle()
    cluster.restart_scheduler(restored=True)
    cluster.settle()
    cluster.send(ev.JobFinished(job="b", outcome="completed"))
    cluster.settle()
    assert placed(cluster) == []
    cluster.send(ev.ControllerAttached(job="a", controller="new"))
    cluster.settle()
    assert placed(cluster) == ["a/actor"]


def test_a_detached_job_whose_workers_start_runs_its_operations_before_it_is_set_aside() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.join_node(4, "n1")
    cluster.join_router()
    cluster.job("a")
    cluster.deploy("a/actor", "rollout", workers=4)
    cluster.submit("o", "a/actor", "generate")
    detach(cluster, "a")
    cluster.job("b")
    cluster.deploy("b/actor", "rollout", workers=2)
    assert placed(cluster) == ["a/actor"]
    cluster.settle()
    assert cluster.state_of("o") == "finished"
    assert placed(cluster) == ["b/actor"]
