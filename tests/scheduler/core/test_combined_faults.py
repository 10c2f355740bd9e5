"""Combinations of retries, losses, deadlines and ends of jobs."""

import json

import pytest
from msgspec.structs import replace

from plexrl.scheduler.operations.held.holding import held_view
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster


def _fail(cluster: FakeCluster, code: str, *, state_intact: bool = True) -> None:
    run = cluster.runs.pop(0)
    cluster.send(
        ev.OperationFailed(
            operation=run.operation,
            token=run.token,
            error={"code": code, "message": "told", "details": {}},
            state_intact=state_intact,
        )
    )


def _started(**changes: object) -> FakeCluster:
    cluster = FakeCluster(**changes)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/train")
    cluster.settle()
    return cluster


def _run_next(cluster: FakeCluster) -> None:
    """Until a run other than a move is in flight."""
    for _ in range(100):
        if cluster.runs and cluster.runs[0].kind not in ("load", "offload", "snapshot"):
            return
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        elif cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            cluster.pass_time(1.0)
    raise AssertionError("nothing runs")


def test_a_node_with_fewer_gpus_that_ends_a_job_leaves_its_other_deployments_ended() -> None:
    cluster = FakeCluster(launch_attempts=1)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/train", workers=4)
    cluster.deploy("a/other", workers=4)
    cluster.settle()
    cluster.kill("a/train")
    cluster.settle()
    cluster.nodes["n"] = replace(cluster.nodes["n"], gpus=1)
    cluster.join_node()
    assert cluster.core.job_view("a", cluster.now)["state"] == "FAILED"
    for name in ("a/train", "a/other"):
        assert cluster.core.deployment_view(name, cluster.now)["state"] == "stopped"


def test_a_deadline_ends_a_run_that_meets_a_full_disk_and_leaves_a_part() -> None:
    cluster = _started()
    cluster.submit("a1", "a/train", "forward_backward", deadline_s=10.0)
    _run_next(cluster)
    cluster.pass_time(20.0)
    _fail(cluster, "storage_full", state_intact=False)
    assert cluster.state_of("a1") == "failed"
    error = cluster.error_of("a1")
    assert error["code"] == "deadline_exceeded"


def test_a_deadline_ends_a_run_whose_node_is_lost() -> None:
    cluster = _started()
    cluster.submit("a1", "a/train", "forward_backward", deadline_s=10.0)
    _run_next(cluster)
    cluster.pass_time(20.0)
    cluster.lose_node("n")
    assert cluster.state_of("a1") == "failed"


def test_a_run_that_meets_another_error_is_held_no_more() -> None:
    cluster = _started()
    cluster.submit("a1", "a/train", "forward_backward")
    cluster.submit("a2", "a/train", "forward_backward")
    _run_next(cluster)
    cluster.refuse(cluster.runs[0])
    assert [
        each["deployment"] for each in held_view(cluster.core.cluster.state, sees_all=True)
    ] == ["a/train"]
    _run_next(cluster)
    _fail(cluster, "invalid_request")
    assert cluster.state_of("a2") != "failed"
    assert held_view(cluster.core.cluster.state, sees_all=True) == []


def test_a_cancelled_hold_says_nothing_of_what_comes_later() -> None:
    cluster = _started()
    cluster.submit("a1", "a/train", "forward_backward")
    _run_next(cluster)
    cluster.refuse(cluster.runs[0])
    cluster.send(ev.OperationCancelled(operation="a1"))
    cluster.pass_time(100.0)
    cluster.submit("a2", "a/train", "forward_backward")
    assert held_view(cluster.core.cluster.state, sees_all=True) == []


def test_processes_that_wait_for_room_are_among_what_is_held() -> None:
    cluster = _started()
    cluster.submit("a1", "a/train", "forward_backward")
    _run_next(cluster)
    _fail(cluster, "storage_full", state_intact=False)
    (held,) = held_view(cluster.core.cluster.state, sees_all=True)
    assert (held["code"], held["message"]) == ("storage_full", "told")
    cluster.settle()
    assert cluster.state_of("a1") == "finished"
    assert held_view(cluster.core.cluster.state, sees_all=True) == []


def test_a_finished_run_whose_error_cannot_be_read_has_failed() -> None:
    cluster = _started()
    cluster.submit("a1", "a/train", "optim_step")
    _run_next(cluster)
    run = cluster.runs.pop(0)
    line = {"type": "OperationFinished", "operation": "a1", "token": run.token, "compute_s": 0.1}
    # An earlier version journalled such reports.
    cluster.send(ev.CODEC.decode(json.dumps({**line, "error_json": "neither this nor that"})))
    assert cluster.error_of("a1")["code"] == "execution_failed"


def test_silent_state_managers_do_not_use_up_the_failures_of_a_rollout() -> None:
    cluster = FakeCluster(launch_attempts=2)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/train")
    cluster.deploy("a/rollout", kind="rollout")
    cluster.settle()
    cluster.submit("s", "a/rollout", "sync_weights", source="a/train")
    cluster.settle()
    cluster.kill("a/rollout")
    cluster.submit("g", "a/rollout", "generate")
    for _ in range(4):
        for _ in range(100):
            if any(run.operation == "s" for run in cluster.runs):
                break
            if cluster.launches:
                cluster.launch(cluster.launches[0])
            elif cluster.runs:
                cluster.execute(cluster.runs[0])
            else:
                cluster.pass_time(1.0)
        run = next(run for run in cluster.runs if run.operation == "s")
        assert run.replay
        cluster.refuse(run, "unavailable")
    cluster.kill("a/rollout")
    cluster.settle()
    assert cluster.core.job_view("a", cluster.now)["state"] not in ("FAILED", "CANCELLED")


def test_a_snapshot_that_leaves_a_part_on_a_full_disk_lets_training_go_on() -> None:
    cluster = _started(snapshot_operations=2)
    for number in range(4):
        cluster.submit(f"a{number}", "a/train", "forward_backward")
    snapshots = 0
    for _ in range(60):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        elif cluster.runs and cluster.runs[0].kind == "snapshot":
            snapshots += 1
            cluster.wpgs["a/train"].device = None
            _fail(cluster, "storage_full", state_intact=False)
        elif cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            cluster.pass_time(1.0)
    assert snapshots
    assert cluster.state_of("a3") == "finished"


@pytest.mark.parametrize("survives", [False, True])
def test_a_node_that_comes_back_without_workers_ends_a_job_once(survives: bool) -> None:
    cluster = FakeCluster(launch_attempts=1)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/train", workers=4)
    cluster.deploy("a/other", workers=4)
    cluster.settle()
    cluster.kill("a/train")
    cluster.settle()
    cluster.submit("a1", "a/train", "forward_backward")
    cluster.wpgs["a/train"].nodes = set()
    if not survives:
        cluster.wpgs["a/other"].nodes = set()
    cluster.join_node()
    assert cluster.core.job_view("a", cluster.now)["state"] == "FAILED"
    for name in ("a/train", "a/other"):
        assert cluster.core.deployment_view(name, cluster.now)["state"] == "stopped"


def test_an_idle_job_outlives_any_number_of_restarts_of_its_node() -> None:
    cluster = _started(launch_attempts=1)
    for _ in range(5):
        cluster.wpgs["a/train"].nodes = set()
        cluster.join_node()
        cluster.settle()
    assert cluster.core.deployment_view("a/train", cluster.now)["state"] == "ready"
    cluster.submit("a1", "a/train", "forward_backward")
    cluster.settle()
    assert cluster.state_of("a1") == "finished"


def _repeating(operations: int, launch_attempts: int) -> FakeCluster:
    """A cluster in which "a/train" repeats a0, a1, ... after a kill, with "new" behind them."""
    cluster = _started(launch_attempts=launch_attempts, snapshot_operations=64)
    for number in range(operations):
        cluster.submit(f"a{number}", "a/train", "forward_backward")
    cluster.settle()
    cluster.kill("a/train")
    cluster.submit("new", "a/train", "forward_backward")
    return cluster


def _lose_workers_at(cluster: FakeCluster, operation: str) -> None:
    """Let the WPG repeat its operations up to this one, and kill a worker while it runs."""
    while not (cluster.runs and cluster.runs[0].operation == operation):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        else:
            cluster.execute(cluster.runs[0])
    cluster.kill("a/train")


def test_faults_at_several_operations_of_a_repetition_end_no_job() -> None:
    cluster = _repeating(6, launch_attempts=1)
    for number in (3, 1, 4, 2, 5):
        _lose_workers_at(cluster, f"a{number}")
    cluster.settle()
    assert cluster.state_of("new") == "finished"


def test_faults_without_end_and_without_new_work_end_a_job() -> None:
    cluster = _repeating(6, launch_attempts=1)
    for number in range(10):
        _lose_workers_at(cluster, f"a{number % 2 + 1}")
    view = cluster.core.job_view("a", cluster.now)
    assert view["state"] == "FAILED"
    assert "11 times without completing an operation" in view["reason"]


def test_a_repetition_that_kills_its_worker_names_the_operation() -> None:
    cluster = _repeating(3, launch_attempts=2)
    for _ in range(3):
        _lose_workers_at(cluster, "a1")
    view = cluster.core.job_view("a", cluster.now)
    assert view["state"] == "FAILED"
    assert "3 times in a row while they executed 'a1'" in view["reason"]


def test_a_report_cannot_name_another_operation_as_the_one_that_failed() -> None:
    cluster = FakeCluster()
    cluster.start_node()
    cluster.job("b", halts_on_failure=True)
    cluster.deploy("b/train")
    cluster.submit("b1", "b/train", "optim_step")
    _run_next(cluster)
    _fail(cluster, "earlier_failure")
    error = cluster.error_of("b1")
    assert error["code"] == "execution_failed"


def test_the_estimate_of_a_start_is_compared_once() -> None:
    cluster = FakeCluster()
    cluster.start_node(gpus=2)
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/train")
    cluster.settle()
    cluster.submit("a1", "a/train", "forward_backward")
    for _ in range(3):
        _run_next(cluster)
        cluster.refuse(cluster.runs[0])
    cluster.settle()
    assert cluster.core.explain_job("a", cluster.now)["eta_quality"]["estimates"] == 1


def test_nodes_that_were_cut_off_speak_against_no_job_at_work() -> None:
    cluster = _started(launch_attempts=1)
    cluster.submit("a1", "a/train", "forward_backward")
    for _ in range(5):
        while not cluster.runs:
            cluster.launch(cluster.launches[0])
        cluster.wpgs["a/train"].nodes = set()
        cluster.wpgs["a/train"].device = None
        cluster.runs.clear()
        (node,) = cluster.nodes.values()
        cluster.send(replace(node, workers=(), was_fenced=True))
    cluster.settle()
    assert cluster.state_of("a1") == "finished"
