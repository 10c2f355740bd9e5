"""Checkpoints of offloaded deployments are saved while another one holds the group."""

import math

import pytest

from plexrl.ids import JobId
from plexrl.wire import messages as cmd
from tests.scheduler.fake_cluster import FakeCluster


def cluster_with_an_offloaded_member() -> FakeCluster:
    """`a` has made one step and is offloaded; a step of `b` runs."""
    cluster = FakeCluster()
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.settle()
    cluster.submit("b:1", "b/actor", "optim_step")
    while [run.operation for run in cluster.runs] != ["b:1"]:
        if cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            cluster.pass_time(1.0)
    return cluster


def run_of(cluster: FakeCluster, operation: str) -> cmd.Run:
    found: cmd.Run = next(run for run in cluster.runs if run.operation == operation)
    return found


def kinds(cluster: FakeCluster) -> list[tuple[str, str]]:
    return [(run.kind.value, run.deployment) for run in cluster.runs]


def gpu_seconds(cluster: FakeCluster, job: str) -> float:
    usage = cluster.core._context.state.jobs[JobId(job)].usage
    return math.fsum(row.gpu_seconds for row in usage.values())


def test_an_offloaded_deployment_saves_its_stored_version_while_another_computes() -> None:
    cluster = cluster_with_an_offloaded_member()
    before = gpu_seconds(cluster, "a")
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    assert kinds(cluster) == [("optim_step", "b/actor"), ("save_checkpoint", "a/actor")]
    save = run_of(cluster, "a:save")
    assert isinstance(save, cmd.SaveCheckpoint)
    assert save.seq == 1
    cluster.pass_time(3.0)
    cluster.execute(save)
    assert cluster.state_of("a:save") == "finished"
    assert gpu_seconds(cluster, "a") == before
    cluster.execute(run_of(cluster, "b:1"))
    cluster.settle()
    (group,) = [each for each in cluster.core.list_groups(cluster.now) if each["shared"]]
    assert group["holder"] == "b/actor"


def test_a_load_waits_until_the_checkpoint_is_pinned() -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.execute(run_of(cluster, "b:1"))
    cluster.pass_time(60.0)
    assert kinds(cluster) == [("save_checkpoint", "a/actor")]
    cluster.execute(run_of(cluster, "a:save"))
    cluster.settle()
    assert cluster.state_of("a:2") == "finished"


def test_operations_before_a_checkpoint_run_first() -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    assert kinds(cluster) == [("optim_step", "b/actor")]
    cluster.settle()
    assert cluster.state_of("a:save") == "finished"


@pytest.mark.parametrize("code", ["state_lost", "conflict"])
def test_a_checkpoint_that_the_stored_state_cannot_give_is_saved_after_a_load(code: str) -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.refuse(run_of(cluster, "a:save"), code)
    assert kinds(cluster) == [("optim_step", "b/actor")]
    cluster.execute(run_of(cluster, "b:1"))
    for _ in range(20):
        if any(run.operation == "a:save" for run in cluster.runs):
            break
        if cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            cluster.pass_time(1.0)
    (group,) = [each for each in cluster.core.list_groups(cluster.now) if each["shared"]]
    assert group["holder"] == "a/actor"
    cluster.settle()
    assert cluster.state_of("a:save") == "finished"


def test_a_name_that_exists_fails_the_checkpoint_at_once() -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.refuse(run_of(cluster, "a:save"), "checkpoint_exists")
    assert cluster.state_of("a:save") == "failed"
    assert kinds(cluster) == [("optim_step", "b/actor")]


def test_workers_that_are_lost_during_it_save_after_their_restart() -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.kill("a/actor")
    cluster.settle()
    assert cluster.state_of("a:save") == "finished"
