"""A failed mutation halts its deployment until the job's controller acknowledges the failure.

A controller may not read its futures, so work that depends on a failed step must not run. After a
mutating operation fails, the operations of its deployment that change, store or publish its state
(`HALTED`) fail with the same cause, including those in the queue. A sync fails with its source, and
halts the deployment that would have received the weights. Operations that only read (`forward`,
`generate`, `barrier`) run. A failed checkpoint halts nothing, but must be acknowledged before the
job can end as completed.

A cancellation is no failure.
"""

from collections.abc import Collection

import msgspec

from plexrl.errors import EarlierFailureError, ExecutionError, PlexRLError, from_wire
from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.state.operation import Failure, Operation
from plexrl.scheduler.state.records import Deployment, Job, State
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.operations import OperationKind

CODE = EarlierFailureError.code


def failure_of(operation: Operation, error: PlexRLError, now: float) -> Failure:
    """The failure to acknowledge after `operation` failed: its own, or the one that caused it."""
    if isinstance(error, EarlierFailureError):
        cause = error.details
        return Failure(
            operation=OperationId(str(cause["operation"])),
            deployment=DeploymentId(str(cause["deployment"])),
            kind=OperationKind(str(cause["kind"])),
            error=msgspec.convert(cause["cause"], ErrorView),
            at=now,
        )
    assert operation.error is not None, f"{operation.operation} has not failed"
    return Failure(
        operation=operation.operation,
        deployment=operation.deployment,
        kind=operation.kind,
        error=operation.error,
        at=now,
    )


def read_error(view: ErrorView) -> PlexRLError:
    """The error of a report."""
    error = from_wire(view)
    # Only the scheduler decides that an operation failed because of another one.
    return ExecutionError(error.message) if isinstance(error, EarlierFailureError) else error


def earlier_failure(failure: Failure) -> EarlierFailureError:
    """The error of operations that do not run because of `failure`."""
    cause = failure.error
    return EarlierFailureError(
        f"the {failure.kind.value} {failure.operation!r} of {failure.deployment!r} failed before: "
        f"{cause['message']} ({cause['code']}). Operations that depend on it do not run "
        "until its error is read from its future, or recover() is called",
        operation=failure.operation,
        deployment=failure.deployment,
        kind=failure.kind.value,
        cause=cause,
    )


def failure_view(failure: Failure | None) -> ErrorView | None:
    """`earlier_failure` in wire format."""
    if failure is None:
        return None
    error = earlier_failure(failure)
    return {"code": error.code, "message": error.message, "details": error.details}


def halting_failure(deployment: Deployment) -> Failure | None:
    """The first unacknowledged failure of a deployment."""
    return deployment.work.unacknowledged[0] if deployment.work.unacknowledged else None


def check_not_halted(deployment: Deployment) -> None:
    """Raises `EarlierFailureError` if it has an unacknowledged failure that halts."""
    for failure in deployment.work.unacknowledged:
        if failure.halts:
            raise earlier_failure(failure)


def job_failure(state: State, job: Job) -> Failure | None:
    """The first unacknowledged failure of a job."""
    found: Failure | None = None
    for name in job.deployments:
        for failure in state.deployments[name].work.unacknowledged[:1]:
            if found is None or failure.at < found.at:
                found = failure
    return found


def root_of(operation: Operation) -> OperationId:
    """The operation whose failure made this one fail; itself if there is no other."""
    error = operation.error
    if error is None or error["code"] != CODE:
        return operation.operation
    return OperationId(error["details"]["operation"])


def acknowledge(state: State, job: Job, operations: Collection[OperationId]) -> None:
    """Acknowledge the failures of these operations: deployments that only they halted continue."""
    for name in job.deployments:
        state.deployments[name].work.acknowledge(operations)
