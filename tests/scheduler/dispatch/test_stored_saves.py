"""Checkpoints of offloaded deployments are saved while another one holds the group."""

import math

import pytest

from plexrl.ids import DeploymentId, JobId, OperationId
from plexrl.scheduler.accounting.sharing import sharing_view
from plexrl.scheduler.state.messages import events as ev
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
    cluster.run_until("b:1")
    return cluster


def run_of(cluster: FakeCluster, operation: str) -> cmd.Run:
    found: cmd.Run = next(run for run in cluster.runs if run.operation == operation)
    return found


def kinds(cluster: FakeCluster) -> list[tuple[str, str]]:
    return [kinds_of(run) for run in cluster.runs]


def kinds_of(run: cmd.Run) -> tuple[str, str]:
    return run.kind.value, run.deployment


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


def test_what_waits_behind_a_checkpoint_is_told_so() -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.submit("a:2", "a/actor", "optim_step")
    told = cluster.explanation_of("a:2")
    assert told["rule"] == "order"
    assert "a checkpoint of its deployment is saved" in told["reason"]
    cluster.execute(run_of(cluster, "a:save"))
    told = cluster.explanation_of("a:2")
    assert (told["rule"], told["holder"]) == ("burst", "b/actor")


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


def test_a_checkpoint_that_was_held_is_asked_for_again_without_a_switch() -> None:
    """Between two operations of the holder, under a new token: workers would repeat an answer."""
    cluster = cluster_with_an_offloaded_member()
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.refuse(run_of(cluster, "a:save"), "storage_full")
    backoff = cluster.core._context.state.deployments[DeploymentId("a/actor")].wpg.backoff
    cluster.pass_time(backoff.until - cluster.now)
    assert kinds(cluster) == [("optim_step", "b/actor")]
    cluster.submit("b:2", "b/actor", "optim_step")
    cluster.execute(run_of(cluster, "b:1"))
    assert kinds(cluster) == [("save_checkpoint", "a/actor"), ("optim_step", "b/actor")]
    cluster.execute(run_of(cluster, "a:save"))
    cluster.execute(run_of(cluster, "b:2"))
    assert cluster.state_of("a:save") == cluster.state_of("b:2") == "finished"
    (group,) = [each for each in cluster.core.list_groups(cluster.now) if each["shared"]]
    assert group["holder"] == "b/actor"


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


def test_a_checkpoint_that_is_refused_after_its_deadline_fails() -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.submit("a:save", "a/actor", "save_checkpoint", deadline_s=5.0)
    save = run_of(cluster, "a:save")
    cluster.pass_time(6.0)
    cluster.refuse(save, "state_lost")
    assert cluster.state_of("a:save") == "failed"
    assert cluster.error_of("a:save")["code"] == "deadline_exceeded"


def test_a_checkpoint_that_needs_a_load_is_not_asked_for_again_before_it() -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.job("c", priority=100)
    cluster.deploy("c/actor")
    while cluster.launches:
        cluster.launch(cluster.launches[0])
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.refuse(run_of(cluster, "a:save"), "conflict")
    cluster.submit("c:1", "c/actor", "optim_step")
    cluster.execute(run_of(cluster, "b:1"))
    loaded = False
    for _ in range(20):
        run = cluster.runs[0] if cluster.runs else None
        if run is None:
            cluster.pass_time(1.0)
            continue
        loaded |= (run.kind.value, run.deployment) == ("load", "a/actor")
        if run.operation == "a:save":
            break
        cluster.execute(run)
    assert loaded
    assert cluster.state_of("c:1") == "finished"
    cluster.settle()
    assert cluster.state_of("a:save") == "finished"


@pytest.mark.parametrize("code", [None, "conflict", "checkpoint_exists"])
def test_what_is_submitted_during_a_checkpoint_waits_for_others_from_its_end_on(
    code: str | None,
) -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    save = run_of(cluster, "a:save")
    burst = cluster.core._context.state.deployments[DeploymentId("a/actor")].demand.burst
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.pass_time(4.0)
    # It would wait for its own checkpoint on a group of its own, too.
    assert burst.wants_since is None
    assert waited_gpu_seconds(cluster, "a") == 0.0
    if code is None:
        cluster.execute(save)
    else:
        cluster.refuse(save, code)
    assert burst.wants_since == cluster.now
    cluster.pass_time(3.0)
    assert waited_gpu_seconds(cluster, "a") == pytest.approx(2 * 3.0)


def test_what_is_queued_behind_a_checkpoint_waits_for_others_from_its_end_on() -> None:
    cluster = cluster_with_an_offloaded_member()
    member = cluster.core._context.state.deployments[DeploymentId("a/actor")]
    # Both are there before the first of them can start.
    cluster.submit("a:2", "a/actor", "forward")
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.submit("a:3", "a/actor", "forward")
    cluster.send(ev.OperationCancelled(operation=OperationId("a:2")))
    save = run_of(cluster, "a:save")
    cluster.pass_time(4.0)
    assert member.demand.burst.wants_since is None
    cluster.execute(save)
    assert member.demand.burst.wants_since == cluster.now


def test_what_is_behind_a_failed_operation_waits_for_others_from_then_on() -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.job("c", priority=100)
    cluster.deploy("c/actor")
    while cluster.launches:
        cluster.launch(cluster.launches[0])
    cluster.submit("b:2", "b/actor", "forward")
    cluster.submit("c:1", "c/actor", "forward")
    cluster.pass_time(400.0)
    cluster.refuse(run_of(cluster, "b:1"), "invalid_request")
    assert kinds(cluster) == [("offload", "b/actor")]
    holder = cluster.core._context.state.deployments[DeploymentId("b/actor")]
    assert holder.demand.burst.wants_since == cluster.now


def waited_gpu_seconds(cluster: FakeCluster, job: str) -> float:
    """GPU time for which the job is said to have waited for others, since its last run."""
    state = cluster.core._context.state
    (row,) = [each for each in sharing_view(state, None, cluster.now) if each["job"] == job]
    return row["waited_gpu_seconds"] - state.jobs[JobId(job)].sharing.waited_gpu_seconds


def test_a_checkpoint_does_not_end_the_back_off_of_a_load_without_memory() -> None:
    cluster = cluster_with_an_offloaded_member()
    cluster.execute(run_of(cluster, "b:1"))
    cluster.submit("a:2", "a/actor", "optim_step")
    backoff = cluster.core._context.state.deployments[DeploymentId("a/actor")].wpg.backoff
    while backoff.tries < 3:
        loads = [run for run in cluster.runs if kinds_of(run) == ("load", "a/actor")]
        if loads:
            cluster.refuse(loads[0], "device_memory_full")
        elif cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            cluster.pass_time(1.0)
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.send(ev.OperationCancelled(operation=OperationId("a:2")))
    cluster.pass_time(20.0)
    cluster.execute(run_of(cluster, "a:save"))
    assert cluster.state_of("a:save") == "finished"
    assert (backoff.code, backoff.tries) == ("device_memory_full", 3)


def test_a_checkpoint_that_needs_no_group_is_no_error_of_the_estimated_waits_for_it() -> None:
    cluster = cluster_with_an_offloaded_member()
    member = cluster.core._context.state.deployments[DeploymentId("a/actor")]
    (group,) = cluster.core._context.state.groups_of(member)
    before = list(group.wait_errors), cluster.core._context.state.eta_errors.count
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    assert run_of(cluster, "a:save")
    after = list(group.wait_errors), cluster.core._context.state.eta_errors.count
    assert after == before
