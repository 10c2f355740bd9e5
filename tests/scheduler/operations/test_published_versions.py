"""A sync of the newest published version does not wait for the trainer, and gets a version that is
there."""

from typing import Any

import pytest

from plexrl.errors import InvalidRequestError, StateLostError
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from tests.scheduler.fake_cluster import FakeCluster, config


@pytest.fixture
def cluster() -> FakeCluster:
    """A trainer that has published its weights after two steps, and two rollouts."""
    cluster = FakeCluster()
    cluster.start_node(gpus=8)
    cluster.job("a")
    cluster.deploy("a/actor")
    for name in ("r0", "r1"):
        cluster.deploy(f"a/{name}", "rollout", workers=1)
        cluster.submit(f"a:{name}", f"a/{name}", "barrier")
    cluster.settle()
    for step in (1, 2):
        cluster.submit(f"a:s{step}", "a/actor", "optim_step")
        cluster.execute(run_of(cluster, f"a:s{step}"), trainer_step=step)
    cluster.submit("a:v2", "a/actor", "publish")
    cluster.settle()
    return cluster


def run_of(cluster: FakeCluster, operation: str) -> Any:
    while not any(run.operation == operation for run in cluster.runs):
        cluster.execute(cluster.runs[0])
    return next(run for run in cluster.runs if run.operation == operation)


def pull(cluster: FakeCluster, operation: str, rollout: str = "a/r0") -> None:
    cluster.submit(operation, rollout, "sync_weights", source="a/actor", published=True)


def refuse(cluster: FakeCluster, run: cmd.Run) -> None:
    cluster.runs.remove(run)
    cluster.send(
        ev.OperationFailed(
            operation=run.operation,
            token=run.token,
            error=StateLostError("it is gone").to_wire(),
            state_intact=True,
        )
    )


def test_it_pulls_while_the_trainer_is_in_its_next_step(cluster: FakeCluster) -> None:
    cluster.submit("a:f3", "a/actor", "forward_backward")
    cluster.submit("a:s3", "a/actor", "optim_step")
    pull(cluster, "a:p0")
    pull(cluster, "a:p1", "a/r1")
    running = {str(run.operation): run for run in cluster.runs}
    assert set(running) == {"a:f3", "a:p0", "a:p1"}
    for name in ("a:p0", "a:p1"):
        sync = running[name]
        assert (sync.source_seq, sync.trainer_step, sync.sources) == (2, 2, ("sm:n",))
        cluster.execute(sync)
        assert cluster.state_of(name) == "finished"
    assert cluster.state_of("a:f3") == "running"


def test_an_ordinary_sync_gets_what_its_trainer_was_told_to_do_before(cluster: FakeCluster) -> None:
    cluster.submit("a:s3", "a/actor", "optim_step")
    cluster.submit("a:p0", "a/r0", "sync_weights", source="a/actor")
    assert [run.operation for run in cluster.runs] == ["a:s3"]
    cluster.execute(run_of(cluster, "a:s3"), trainer_step=3)
    assert run_of(cluster, "a:p0").trainer_step == 3


def test_the_newest_version_at_its_start_is_pulled(cluster: FakeCluster) -> None:
    cluster.submit("a:g", "a/r0", "generate")
    pull(cluster, "a:p0")
    cluster.submit("a:s3", "a/actor", "optim_step")
    cluster.submit("a:v3", "a/actor", "publish")
    while cluster.state_of("a:v3") != "finished":
        cluster.execute(
            next(run for run in cluster.runs if run.deployment == "a/actor"), trainer_step=3
        )
    sync = run_of(cluster, "a:p0")
    assert (sync.source_seq, sync.trainer_step) == (3, 3)


def test_a_publish_that_is_queued_is_not_awaited(cluster: FakeCluster) -> None:
    cluster.submit("a:s3", "a/actor", "optim_step")
    cluster.submit("a:v3", "a/actor", "publish")
    pull(cluster, "a:p0")
    assert run_of(cluster, "a:p0").trainer_step == 2


def test_before_the_first_publish_the_trainer_publishes_for_the_sync() -> None:
    cluster = FakeCluster()
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/r0", "rollout", workers=1)
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    pull(cluster, "a:p0")
    assert [run.operation for run in cluster.runs] == ["a:p0#publish"]
    assert cluster.explanation_of("a:p0")["rule"] == "dependency"
    cluster.settle()
    assert cluster.state_of("a:p0") == "finished"


def test_a_version_that_is_gone_is_published_again(cluster: FakeCluster) -> None:
    pull(cluster, "a:p0")
    refuse(cluster, run_of(cluster, "a:p0"))
    assert cluster.state_of("a:p0") == "pending"
    assert [run.operation for run in cluster.runs] == ["a:p0#publish"]
    cluster.settle()
    assert cluster.state_of("a:p0") == "finished"


def test_a_version_that_is_gone_each_time_fails_the_sync_at_last(cluster: FakeCluster) -> None:
    pull(cluster, "a:p0")
    for _ in range(config().launch_attempts):
        refuse(cluster, run_of(cluster, "a:p0"))
        assert cluster.state_of("a:p0") == "pending"
    refuse(cluster, run_of(cluster, "a:p0"))
    assert cluster.error_of("a:p0")["code"] == "state_lost"


def test_the_weights_of_a_syncs_own_publish_are_published_again_before_the_trainer_goes_on(
    cluster: FakeCluster,
) -> None:
    cluster.submit("a:s3", "a/actor", "optim_step")
    cluster.submit("a:p0", "a/r0", "sync_weights", source="a/actor")
    cluster.execute(run_of(cluster, "a:s3"), trainer_step=3)
    sync = run_of(cluster, "a:p0")
    cluster.submit("a:f4", "a/actor", "forward_backward")
    cluster.submit("a:s4", "a/actor", "optim_step")
    refuse(cluster, sync)
    cluster.restart_scheduler(restored=True)
    assert cluster.state_of("a:p0") == "pending"
    cluster.execute(run_of(cluster, "a:f4"))
    again = run_of(cluster, "a:p0")
    assert (again.source_seq, again.trainer_step) == (sync.source_seq + 1, 3)
    cluster.settle()
    assert [cluster.state_of(name) for name in ("a:p0", "a:f4", "a:s4")] == ["finished"] * 3


def test_what_was_published_and_pulled_is_known_after_a_restart(cluster: FakeCluster) -> None:
    cluster.restart_scheduler(restored=True)
    pull(cluster, "a:p0")
    assert run_of(cluster, "a:p0").source_seq == 2


def test_only_a_sync_can_be_published(cluster: FakeCluster) -> None:
    with pytest.raises(InvalidRequestError, match="only a sync can"):
        cluster.submit("a:x", "a/actor", "optim_step", published=True)
    with pytest.raises(InvalidRequestError, match="publish is no operation of a rollout"):
        cluster.submit("a:x", "a/r0", "publish")


def test_a_publish_after_a_failed_step_is_refused(cluster: FakeCluster) -> None:
    cluster.job("b", halts_on_failure=True)
    cluster.deploy("b/actor")
    cluster.settle()
    cluster.submit("b:1", "b/actor", "optim_step")
    cluster.submit("b:2", "b/actor", "publish")
    run = run_of(cluster, "b:1")
    cluster.runs.remove(run)
    cluster.send(
        ev.OperationFailed(
            operation="b:1",
            token=run.token,
            error=InvalidRequestError("no").to_wire(),
            state_intact=True,
        )
    )
    assert cluster.error_of("b:2")["code"] == "earlier_failure"
