"""A damaged payload is asked again, costs no worker, and fails its operation only at the end."""

from typing import Any

import pytest

from plexrl.errors import PayloadLostError
from plexrl.ids import BlobRef
from plexrl.scheduler.operations.submission.lost_payloads import ASKED_S
from plexrl.scheduler.state.deployment.wpg.backoff import BACKOFF_S_MAX
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages import Run
from tests.scheduler.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> FakeCluster:
    # The first lost worker would end the job.
    cluster = FakeCluster(launch_attempts=1)
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="t"))
    cluster.job("a")
    cluster.deploy("a/actor", workers=4)
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    return cluster


def submit(cluster: FakeCluster, operation: str, payload: str) -> None:
    cluster.submit(
        operation,
        "a/actor",
        "forward_backward",
        payload=BlobRef(payload),
        payload_bytes=3,
        payload_digest=f"digest of {operation}",
    )


def lose(cluster: FakeCluster, run: Run, blob: str) -> None:
    """The router finds a blob of the run damaged, and sends nothing to the workers."""
    cluster.runs.remove(run)
    error = PayloadLostError(f"the payload {blob!r} is damaged or lost", payload=blob)
    cluster.send(
        ev.OperationFailed(
            operation=run.operation,
            token=run.token,
            error=error.to_wire(),
            state_intact=True,
        )
    )


def job_state(cluster: FakeCluster) -> str:
    return str(cluster.core.job_view("a", cluster.now)["state"])


def lose_until_it_fails(cluster: FakeCluster) -> None:
    began_at = cluster.now
    while cluster.state_of("a:1") not in ("failed", "finished") and job_state(cluster) != "FAILED":
        if cluster.runs:
            lose(cluster, cluster.runs[0], "a:1.in")
        # The controller lives.
        cluster.send(ev.ControllerSeen(job="a"))
        cluster.pass_time(1.0)
        assert cluster.now < began_at + ASKED_S + 2 * BACKOFF_S_MAX
    assert cluster.now >= began_at + ASKED_S


def test_a_lost_payload_is_asked_again_and_the_next_one_takes_its_place(
    cluster: FakeCluster,
) -> None:
    submit(cluster, "a:1", "a:1.in")
    submit(cluster, "a:2", "a:2.in")
    lose(cluster, cluster.runs[0], "a:1.in")
    assert cluster.state_of("a:1") == "pending"
    assert cluster.explanation_of("a:1")["rule"] == "held"
    assert cluster.core.lost_payloads("a") == ["a:1"]
    cluster.pass_time(BACKOFF_S_MAX)
    lose(cluster, cluster.runs[0], "a:1.in")
    submit(cluster, "a:1", "again.in")
    assert cluster.core.lost_payloads("a") == []
    (run,) = cluster.runs
    assert run.payload == "again.in", "it runs at once"
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2"]


def test_a_payload_that_is_not_lost_is_not_replaced(cluster: FakeCluster) -> None:
    submit(cluster, "a:1", "a:1.in")
    submit(cluster, "a:1", "again.in")
    assert cluster.core.operation_view("a:1", cluster.now)["payload"] == "a:1.in"


def test_a_payload_that_nobody_sends_again_fails_its_operation_and_no_worker(
    cluster: FakeCluster,
) -> None:
    submit(cluster, "a:1", "a:1.in")
    lose_until_it_fails(cluster)
    error = cluster.core.operation_view("a:1", cluster.now)["error"]
    assert error is not None
    assert error["code"] == "payload_lost"
    assert error["details"]["payload"] == "a:1.in"
    assert job_state(cluster) != "FAILED"
    cluster.send(ev.FailureAcknowledged(operation="a:1"))
    submit(cluster, "a:2", "a:2.in")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:2"]


@pytest.mark.parametrize("had_run", [False, True])
def test_a_lost_payload_of_a_run_that_a_lost_router_had_is_run_exactly_once(
    cluster: FakeCluster, *, had_run: bool
) -> None:
    """The workers may have the payload from the lost router, and its report never came."""
    submit(cluster, "a:1", "a:1.in")
    (run,) = cluster.runs
    if had_run:
        cluster.execute(run, report=False)
    cluster.lose_router()
    cluster.pass_time(1.0)
    cluster.join_router()
    (run,) = cluster.runs
    lose(cluster, run, "a:1.in")
    assert cluster.launches, "the workers keep what may have run"
    cluster.launch(cluster.launches[0])
    while not cluster.core.lost_payloads("a"):
        (run,) = cluster.runs
        if run.operation == "a:1":
            lose(cluster, run, "a:1.in")
        else:
            cluster.execute(run)
    submit(cluster, "a:1", "again.in")
    submit(cluster, "a:2", "a:2.in")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2"]
    assert job_state(cluster) != "FAILED"


def begin_replay(cluster: FakeCluster) -> Any:
    submit(cluster, "a:1", "a:1.in")
    cluster.settle()
    return kill_and_replay(cluster)


def kill_and_replay(cluster: FakeCluster) -> Any:
    """Workers die, and what they had done is repeated for the next operation."""
    cluster.kill("a/actor")
    submit(cluster, "a:2", "a:2.in")
    while not any(run.replay for run in cluster.runs):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        else:
            cluster.execute(cluster.runs[0])
    return cluster.runs[0]


def test_a_replay_with_a_lost_payload_costs_no_attempt_and_goes_on_with_the_next_one(
    cluster: FakeCluster,
) -> None:
    run = begin_replay(cluster)
    for _ in range(3):
        lose(cluster, run, "a:1.in")
        assert cluster.core.lost_payloads("a") == ["a:1"]
        cluster.pass_time(BACKOFF_S_MAX)
        (run,) = cluster.runs
    lose(cluster, run, "a:1.in")
    submit(cluster, "a:1", "again.in")
    (run,) = cluster.runs
    assert run.replay
    assert run.payload == "again.in"
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2"]


def test_a_lost_payload_of_a_replay_that_no_lost_router_had_costs_no_workers(
    cluster: FakeCluster,
) -> None:
    submit(cluster, "a:1", "a:1.in")
    cluster.settle()
    cluster.pass_time(1.0)
    cluster.lose_router()
    cluster.pass_time(1.0)
    cluster.join_router()
    cluster.pass_time(1.0)
    lose(cluster, kill_and_replay(cluster), "a:1.in")
    assert not cluster.launches
    assert cluster.core.lost_payloads("a") == ["a:1"]
    submit(cluster, "a:1", "again.in")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2"]


def test_a_replay_whose_payload_nobody_has_ends_the_job_and_names_the_payload(
    cluster: FakeCluster,
) -> None:
    lose(cluster, begin_replay(cluster), "a:1.in")
    began_at = cluster.now
    while job_state(cluster) != "FAILED":
        if cluster.runs:
            lose(cluster, cluster.runs[0], "a:1.in")
        cluster.pass_time(1.0)
    assert cluster.now >= began_at + ASKED_S
    reason = cluster.core.job_view("a", cluster.now)["reason"]
    assert reason is not None
    assert "'a:1.in' is damaged or lost" in reason


def test_a_detached_controller_has_until_its_job_is_cancelled(cluster: FakeCluster) -> None:
    cluster.send(
        ev.JobSubmitted(
            job="d", tenant="t", name="d", controller_timeout_s=10, reattach_timeout_s=10 * ASKED_S
        )
    )
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    cluster.deploy("d/actor", workers=4)
    cluster.submit(
        "d:1",
        "d/actor",
        "forward_backward",
        payload=BlobRef("d:1.in"),
        payload_digest="digest",
    )
    for _ in range(5):
        while not any(run.operation == "d:1" for run in cluster.runs):
            if cluster.launches:
                cluster.launch(cluster.launches[0])
            elif cluster.runs:
                cluster.execute(cluster.runs[0])
            else:
                cluster.pass_time(1.0)
        lose(cluster, cluster.runs[0], "d:1.in")
        cluster.pass_time(ASKED_S / 2)
    assert not cluster.core.job_view("d", cluster.now)["attached"]
    assert cluster.state_of("d:1") in ("pending", "running")
