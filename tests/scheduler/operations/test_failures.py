"""A failed mutation halts its deployment until the controller acknowledges the failure."""

import pytest

from plexrl import errors
from plexrl.scheduler.queries.views import usage_view
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster

NO_LUCK = errors.ExecutionError("no luck").to_wire()
SPOILT = errors.NonFiniteWeightsError("w is nan").to_wire()
DROPPED = errors.NonFiniteGradientError("the norm is nan").to_wire()


@pytest.fixture
def cluster() -> FakeCluster:
    made = FakeCluster()
    made.start_node()
    made.job("a", halts_on_failure=True)
    made.deploy("a/actor")
    made.deploy("a/rollout", kind="rollout")
    made.settle()
    return made


def fail(
    cluster: FakeCluster, operation: str, *, state_intact: bool = True, error: ErrorView = NO_LUCK
) -> None:
    """The run in flight of an operation fails."""
    while not (found := [each for each in cluster.runs if each.operation == operation]):
        cluster.execute(cluster.runs[0])
    (run,) = found
    cluster.runs.remove(run)
    cluster.send(
        ev.OperationFailed(
            operation=operation, token=run.token, error=error, state_intact=state_intact
        )
    )


def begin_steps(cluster: FakeCluster) -> None:
    """Have `a:step` in flight, and what a controller that reads no futures submits behind it."""
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:step", "a/actor", "optim_step")
    cluster.submit("a:sync", "a/rollout", "sync_weights", source="a/actor")
    cluster.submit("a:generate", "a/rollout", "generate")
    cluster.submit("a:forward", "a/actor", "forward")
    cluster.submit("a:next", "a/actor", "forward_backward")
    cluster.submit("a:save", "a/actor", "save_checkpoint")


def outcome(cluster: FakeCluster, operation: str) -> str:
    """`finished`, or the code of its error."""
    view = cluster.core.operation_view(operation, cluster.now)
    return str(view["state"] if view["error"] is None else view["error"]["code"])


def acknowledge(cluster: FakeCluster, **named: str) -> None:
    cluster.send(ev.FailureAcknowledged(**named))


def failure_of(cluster: FakeCluster, deployment: str) -> str | None:
    view = cluster.core.deployment_view(deployment, cluster.now)["failure"]
    return None if view is None else str(view["details"]["operation"])


@pytest.mark.parametrize("state_intact", [True, False])
def test_what_is_queued_behind_a_failed_mutation_fails_with_its_cause(
    cluster: FakeCluster, state_intact: bool
) -> None:
    begin_steps(cluster)
    fail(cluster, "a:step", state_intact=state_intact)
    cluster.settle()
    halted = ("a:sync", "a:next", "a:save")
    assert {name: outcome(cluster, name) for name in halted} == dict.fromkeys(
        halted, "earlier_failure"
    )
    error = errors.from_wire(cluster.core.operation_view("a:next", cluster.now)["error"])
    assert error.details["operation"] == "a:step"
    assert isinstance(error.__cause__, errors.ExecutionError)
    # What only reads goes on, with the state of before.
    assert [outcome(cluster, name) for name in ("a:generate", "a:forward")] == ["finished"] * 2
    assert cluster.core.deployment_view("a/actor", cluster.now)["applied_seq"] == 0


def test_what_is_submitted_after_a_failure_is_refused_until_it_is_acknowledged(
    cluster: FakeCluster,
) -> None:
    begin_steps(cluster)
    fail(cluster, "a:step")
    for kind in ("optim_step", "forward_backward", "load_checkpoint", "save_checkpoint"):
        with pytest.raises(errors.EarlierFailureError, match="'a:step' of 'a/actor' failed"):
            cluster.submit("a:again", "a/actor", kind)
    with pytest.raises(errors.EarlierFailureError):
        cluster.submit("a:again", "a/rollout", "sync_weights", source="a/actor")
    acknowledge(cluster, operation="a:step")
    cluster.submit("a:again", "a/actor", "optim_step")
    cluster.submit("a:sync again", "a/rollout", "sync_weights", source="a/actor")
    cluster.settle()
    assert outcome(cluster, "a:again") == outcome(cluster, "a:sync again") == "finished"


def test_a_failure_is_acknowledged_by_any_operation_that_failed_of_it(cluster: FakeCluster) -> None:
    begin_steps(cluster)
    fail(cluster, "a:step")
    assert failure_of(cluster, "a/actor") == failure_of(cluster, "a/rollout") == "a:step"
    acknowledge(cluster, operation="a:sync")
    assert failure_of(cluster, "a/actor") is failure_of(cluster, "a/rollout") is None


@pytest.mark.parametrize("deployment", ["a/actor", "a/rollout"])
def test_a_failure_is_acknowledged_for_all_that_it_halts(
    cluster: FakeCluster, deployment: str
) -> None:
    begin_steps(cluster)
    fail(cluster, "a:step")
    acknowledge(cluster, deployment=deployment)
    assert failure_of(cluster, "a/actor") is failure_of(cluster, "a/rollout") is None


def test_steps_to_weights_that_are_not_finite_end_no_job_however_many() -> None:
    cluster = FakeCluster(launch_attempts=2)
    cluster.start_node()
    cluster.job("a", halts_on_failure=True)
    cluster.deploy("a/actor")
    for number in range(5):
        cluster.submit(f"a:{number}", "a/actor", "optim_step")
        while cluster.launches:
            cluster.launch(cluster.launches[0])
        fail(cluster, f"a:{number}", state_intact=False, error=SPOILT)
        acknowledge(cluster, operation=f"a:{number}")
    assert not cluster.core.job_view("a", cluster.now)["ended_at"]


def test_a_failed_checkpoint_halts_nothing_and_is_not_passed_over(cluster: FakeCluster) -> None:
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.submit("a:step", "a/actor", "optim_step")
    fail(cluster, "a:save")
    cluster.submit("a:next", "a/actor", "optim_step")
    cluster.settle()
    assert [outcome(cluster, name) for name in ("a:step", "a:next")] == ["finished"] * 2
    story = cluster.core.explain_job("a", cluster.now)["summary"]
    assert "save_checkpoint 'a:save' of 'a/actor' failed" in story
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    assert cluster.core.job_view("a", cluster.now)["state"] == "FAILED"


def test_a_later_failure_is_not_acknowledged_with_an_earlier_one(cluster: FakeCluster) -> None:
    begin_steps(cluster)
    fail(cluster, "a:step")
    acknowledge(cluster, operation="a:step")
    cluster.submit("a:second", "a/actor", "optim_step")
    fail(cluster, "a:second")
    acknowledge(cluster, operation="a:next")
    assert failure_of(cluster, "a/actor") == "a:second"


def test_a_failed_sync_halts_the_rollout_and_not_its_trainer(cluster: FakeCluster) -> None:
    cluster.submit("a:0", "a/rollout", "barrier")
    cluster.submit("a:sync", "a/rollout", "sync_weights", source="a/actor")
    fail(cluster, "a:sync")
    with pytest.raises(errors.EarlierFailureError):
        cluster.submit("a:load", "a/rollout", "load_checkpoint")
    cluster.submit("a:step", "a/actor", "optim_step")
    cluster.settle()
    assert outcome(cluster, "a:step") == "finished"


def test_what_the_user_cancels_halts_nothing(cluster: FakeCluster) -> None:
    begin_steps(cluster)
    cluster.send(ev.OperationCancelled(operation="a:next"))
    cluster.settle()
    assert outcome(cluster, "a:save") == "finished"
    assert failure_of(cluster, "a/actor") is None


def test_a_mutation_that_missed_its_deadline_halts_its_deployment(cluster: FakeCluster) -> None:
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.submit("a:2", "a/actor", "forward_backward", deadline_s=1.0)
    cluster.submit("a:3", "a/actor", "optim_step")
    cluster.pass_time(2.0)
    assert outcome(cluster, "a:3") == "earlier_failure"


def test_what_was_submitted_before_a_missed_deadline_is_carried_out(cluster: FakeCluster) -> None:
    # The model is not on the GPUs yet, so all of them wait.
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.submit("a:2", "a/actor", "forward_backward")
    cluster.submit("a:3", "a/actor", "forward_backward", deadline_s=1.0)
    cluster.submit("a:4", "a/actor", "optim_step")
    cluster.pass_time(2.0)
    assert [outcome(cluster, f"a:{n}") for n in (3, 4)] == ["deadline_exceeded", "earlier_failure"]
    fail(cluster, "a:1")
    assert outcome(cluster, "a:2") == "earlier_failure"
    acknowledge(cluster, operation="a:3")
    assert failure_of(cluster, "a/actor") == "a:1", "two failures, and one was taken note of"
    acknowledge(cluster, deployment="a/actor")
    assert failure_of(cluster, "a/actor") is None


def test_a_step_that_dropped_its_gradients_has_failed_and_is_replayed(cluster: FakeCluster) -> None:
    begin_steps(cluster)
    (run,) = [each for each in cluster.runs if each.operation == "a:step"]
    cluster.execute(run, report=False)
    cluster.runs.remove(run)
    cluster.send(
        ev.OperationFinished(operation="a:step", token=run.token, compute_s=0.1, error=DROPPED)
    )
    assert outcome(cluster, "a:step") == "non_finite_gradient"
    assert outcome(cluster, "a:next") == "earlier_failure"
    cluster.kill("a/actor")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:step"]
    rows = {row["kind"]: row["failed"] for row in usage_view(cluster.core.cluster.state, None)}
    assert rows["optim_step"] == 1
    assert rows["forward_backward"] == 1, "it failed without having run"
    assert rows["forward"] == 0


def test_a_job_with_an_unacknowledged_failure_does_not_end_as_completed(
    cluster: FakeCluster,
) -> None:
    begin_steps(cluster)
    fail(cluster, "a:step")
    failure = cluster.core.job_view("a", cluster.now)["failure"]
    assert failure is not None
    assert failure["details"]["operation"] == "a:step"
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    view = cluster.core.job_view("a", cluster.now)
    assert view["state"] == "FAILED"
    assert "a:step failed: no luck" in view["reason"]


def test_a_job_whose_failure_was_acknowledged_ends_as_its_controller_says(
    cluster: FakeCluster,
) -> None:
    begin_steps(cluster)
    fail(cluster, "a:step")
    acknowledge(cluster, deployment="a/actor")
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    assert cluster.core.job_view("a", cluster.now)["state"] == "COMPLETED"


def test_a_job_of_a_journal_of_before_is_not_halted(cluster: FakeCluster) -> None:
    cluster.job("old")
    cluster.deploy("old/actor")
    cluster.submit("old:1", "old/actor", "optim_step")
    cluster.submit("old:2", "old/actor", "optim_step")
    while cluster.launches:
        cluster.launch(cluster.launches[0])
    fail(cluster, "old:1")
    cluster.settle()
    assert outcome(cluster, "old:2") == "finished"


def test_a_failure_outlives_a_restart_of_the_scheduler(cluster: FakeCluster) -> None:
    begin_steps(cluster)
    fail(cluster, "a:step")
    cluster.restart_scheduler(restored=True)
    assert failure_of(cluster, "a/actor") == failure_of(cluster, "a/rollout") == "a:step"


def test_waiting_gradients_are_counted_until_a_step_or_a_load(cluster: FakeCluster) -> None:
    def waiting() -> int:
        cluster.settle()
        view = cluster.core.deployment_view("a/actor", cluster.now)
        return int(view["waiting_gradients"])

    for number, kind in enumerate(("optim_step", "zero_grad", "load_checkpoint")):
        cluster.submit(f"a:{number}.1", "a/actor", "forward_backward")
        cluster.submit(f"a:{number}.2", "a/actor", "forward_backward")
        cluster.kill("a/actor")
        assert waiting() == 2
        cluster.submit(f"a:{number}.3", "a/actor", kind)
        assert waiting() == 0


def test_who_attaches_a_job_finds_no_gradients_of_its_former_controller(
    cluster: FakeCluster,
) -> None:
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.settle()
    cluster.submit("a:2", "a/actor", "forward_backward")
    cluster.send(ev.ControllerAttached(job="a", controller="new"))
    cluster.send(ev.ControllerAttached(job="a", controller="new"))
    cluster.submit("a:3", "a/actor", "forward_backward", controller="new")
    cluster.settle()
    applied = cluster.wpgs["a/actor"].device
    assert applied is not None
    kinds = [name.rpartition("#")[2].partition(".")[0] for name in applied]
    assert kinds == ["a:1", "a:2", "zero_grad", "a:3"]
    assert cluster.core.deployment_view("a/actor", cluster.now)["waiting_gradients"] == 1


def test_gradients_are_kept_where_the_new_controller_wants_them_or_none_wait(
    cluster: FakeCluster,
) -> None:
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.send(ev.ControllerAttached(job="a", controller="new", keep_gradients=True))
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.send(ev.ControllerAttached(job="a", controller="newer"))
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2"]


def test_a_former_controller_is_fenced_off(cluster: FakeCluster) -> None:
    cluster.job("b", controller="old")
    cluster.deploy("b/actor", workers=1)
    cluster.submit("b:1", "b/actor", "optim_step", controller="old")
    cluster.send(ev.ControllerAttached(job="b", controller="new"))
    for event in (
        ev.ControllerSeen(job="b", controller="old"),
        ev.JobFinished(job="b", outcome="completed", controller="old"),
        ev.OperationCancelled(operation="b:1", controller="old"),
        ev.FailureAcknowledged(deployment="b/actor", controller="old"),
        ev.OperationSubmitted(
            operation="b:2",
            deployment="b/actor",
            kind=OperationKind.BARRIER,
            params=None,
            controller="old",
        ),
    ):
        with pytest.raises(errors.ControllerReplacedError, match="another controller"):
            cluster.send(event)
    with pytest.raises(errors.ControllerReplacedError):
        cluster.deploy("b/other", workers=1, controller="old")
    cluster.submit("b:3", "b/actor", "barrier", controller="new")
    # An operator, or a controller without a token.
    cluster.send(ev.OperationCancelled(operation="b:3"))
    assert cluster.state_of("b:3") == "cancelled"


def test_submitting_a_job_that_lives_takes_it_over(cluster: FakeCluster) -> None:
    cluster.job("b", controller="old")
    cluster.job("b", controller="old")
    cluster.send(ev.ControllerSeen(job="b", controller="old"))
    cluster.job("b", controller="new")
    with pytest.raises(errors.ControllerReplacedError):
        cluster.send(ev.ControllerSeen(job="b", controller="old"))
