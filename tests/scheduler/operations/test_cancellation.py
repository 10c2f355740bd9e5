"""Deadlines and cancellation: late operations never run, generations stop, others finish."""

import pytest

from plexrl import errors
from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.operations.deadlines.cancellation import early_end
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.operation import Operation
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> FakeCluster:
    made = FakeCluster()
    made.start_node()
    made.job("a")
    made.deploy("a/actor")
    made.deploy("a/rollout", kind="rollout")
    made.settle()
    return made


def error_of(cluster: FakeCluster, operation: str) -> str:
    return cluster.error_of(operation)["code"]


def test_an_operation_that_has_not_begun_by_its_deadline_never_runs(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/actor", "optim_step", deadline_s=5.0)
    cluster.submit("a:3", "a/actor", "barrier")
    cluster.pass_time(4.9)
    assert cluster.state_of("a:2") == "pending"
    cluster.pass_time(0.2)
    assert (cluster.state_of("a:2"), error_of(cluster, "a:2")) == ("failed", "deadline_exceeded")
    cluster.settle()
    assert [cluster.state_of(name) for name in ("a:1", "a:3")] == ["finished", "finished"]
    assert cluster.core.deployment_view("a/actor", cluster.now)["applied_seq"] == 1


def test_one_that_begins_in_time_is_left_alone(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "optim_step", deadline_s=5.0)
    cluster.settle()
    cluster.pass_time(10.0)
    assert cluster.state_of("a:1") == "finished"


def test_a_run_that_changes_state_is_finished_however_long_it_takes(cluster: FakeCluster) -> None:
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step", deadline_s=5.0)
    assert cluster.state_of("a:1") == "running"
    cluster.pass_time(10.0)
    assert cluster.state_of("a:1") == "running"
    cluster.settle()
    assert cluster.state_of("a:1") == "finished"


def test_a_running_generation_is_ended_with_what_it_has(cluster: FakeCluster) -> None:
    cluster.submit("a:0", "a/rollout", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/rollout", "generate", deadline_s=5.0)
    assert cluster.state_of("a:1") == "running"
    emitted: list[cmd.Command] = []
    take = cluster.take

    def watch(commands: list[cmd.Command]) -> None:
        emitted.extend(commands)
        take(commands)

    cluster.take = watch  # type: ignore[method-assign]
    cluster.pass_time(5.1)
    aborts = [each for each in emitted if isinstance(each, cmd.AbortOperation)]
    assert [each.operation for each in aborts] == ["a:1"]
    cluster.settle()
    assert cluster.state_of("a:1") == "finished"


def test_a_run_that_is_interrupted_after_its_deadline_does_not_start_again(
    cluster: FakeCluster,
) -> None:
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step", deadline_s=5.0)
    assert cluster.state_of("a:1") == "running"
    cluster.pass_time(5.1)
    cluster.kill("a/actor")
    cluster.settle()
    assert (cluster.state_of("a:1"), error_of(cluster, "a:1")) == ("failed", "deadline_exceeded")
    assert cluster.core.deployment_view("a/actor", cluster.now)["applied_seq"] == 0


def test_a_cancelled_generation_does_not_start_again_on_new_workers(cluster: FakeCluster) -> None:
    cluster.submit("a:0", "a/rollout", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/rollout", "generate")
    cluster.send(ev.OperationCancelled(operation="a:1"))
    assert cluster.state_of("a:1") == "running"
    cluster.kill("a/rollout")
    cluster.settle()
    assert (cluster.state_of("a:1"), error_of(cluster, "a:1")) == (
        "cancelled",
        "operation_cancelled",
    )


def test_a_deadline_outlives_the_scheduler(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/actor", "optim_step", deadline_s=5.0)
    restored = type(cluster.core).restore(cluster.config, cluster.core.dump())
    cluster.core = restored
    cluster.pass_time(5.1)
    assert error_of(cluster, "a:2") == "deadline_exceeded"


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, 1e9])
def test_a_deadline_that_cannot_be_is_refused(cluster: FakeCluster, deadline_s: float) -> None:
    with pytest.raises(errors.InvalidRequestError, match="deadline_s"):
        cluster.submit("a:1", "a/actor", "barrier", deadline_s=deadline_s)
    with pytest.raises(errors.UnknownOperationError):
        cluster.state_of("a:1")


def test_the_same_request_with_less_time_left_is_the_same_request(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "barrier", deadline_s=5.0)
    cluster.submit("a:1", "a/actor", "barrier", deadline_s=3.0)
    assert cluster.core.operation_view("a:1", cluster.now)["deadline_at"] == cluster.now + 5.0


def watched(cluster: FakeCluster) -> list[cmd.Run | cmd.AbortOperation]:
    """The commands about runs from now on."""
    emitted: list[cmd.Run | cmd.AbortOperation] = []
    take = cluster.take

    def watch(commands: list[cmd.Command]) -> None:
        emitted.extend(each for each in commands if isinstance(each, cmd.Run | cmd.AbortOperation))
        take(commands)

    cluster.take = watch  # type: ignore[method-assign]
    return emitted


def test_rows_of_a_waiting_generation_are_stopped_before_its_run_begins(
    cluster: FakeCluster,
) -> None:
    emitted = watched(cluster)
    cluster.submit("a:1", "a/rollout", "generate")
    assert cluster.state_of("a:1") == "pending"
    for rows in ((3, 1), (1,)):
        cluster.send(ev.OperationCancelled(operation="a:1", rows=rows))
    cluster.core = type(cluster.core).restore(cluster.config, cluster.core.dump())
    cluster.settle()
    assert cluster.state_of("a:1") == "finished"
    stop, run = (each for each in emitted if each.operation == "a:1")
    assert isinstance(stop, cmd.AbortOperation)
    assert stop.rows == (1, 3)
    assert isinstance(run, cmd.Run)


def test_rows_of_a_running_generation_are_stopped_and_stay_so_when_it_is_repeated(
    cluster: FakeCluster,
) -> None:
    cluster.submit("a:0", "a/rollout", "barrier")
    cluster.settle()
    emitted = watched(cluster)
    cluster.submit("a:1", "a/rollout", "generate")
    cluster.send(ev.OperationCancelled(operation="a:1", rows=(2,)))
    cluster.send(ev.OperationCancelled(operation="a:1", rows=(0,)))
    stops = [each.rows for each in emitted if isinstance(each, cmd.AbortOperation)]
    assert stops == [(2,), (0,)]
    emitted.clear()
    cluster.kill("a/rollout")
    cluster.settle()
    assert cluster.state_of("a:1") == "finished"
    kinds = [
        (type(each), getattr(each, "rows", None)) for each in emitted if each.operation == "a:1"
    ]
    assert kinds == [(cmd.AbortOperation, (0, 2)), (cmd.Generate, None)]


def test_only_a_generation_has_rows_to_stop(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "barrier")
    with pytest.raises(errors.ConflictError, match="only a generate has rows"):
        cluster.send(ev.OperationCancelled(operation="a:1", rows=(0,)))


def test_an_operation_that_ends_early_was_cancelled_unless_its_deadline_has_passed() -> None:
    kind = OperationKind.GENERATE
    operation = Operation(OperationId("o"), DeploymentId("a/b"), kind, 10.0, internal=False)
    assert isinstance(early_end(operation, 99.0), errors.OperationCancelledError)
    operation.deadline_at = 50.0
    assert isinstance(early_end(operation, 49.0), errors.OperationCancelledError)
    late = early_end(operation, 50.0)
    assert isinstance(late, errors.DeadlineExceededError)
    assert late.details["deadline_s"] == 40.0
