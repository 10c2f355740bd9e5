"""A failed mutation halts its deployment until the job's controller has acknowledged it.

A controller need not read its futures, so a step that failed must not be followed by work that
builds on it. From the moment a mutating operation fails, the operations of its deployment that
change, keep or hand on its state (`HALTED`) fail with that cause, those that are queued already
too. A sync fails with its source, and halts the deployment that was to get the weights. Operations
that only read (`forward`, `generate`, `barrier`) go on. A failed checkpoint halts nothing, but must
be acknowledged too before the job can end as completed.

What a user cancels is no failure: the user knows.
"""

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from plexrl.errors import EarlierFailureError, ExecutionError, PlexRLError, from_wire
from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.state.operation import Failure, Operation
from plexrl.scheduler.state.records import Deployment, Job, State
from plexrl.wire.operations import OperationKind

CODE = EarlierFailureError.code


def failure_of(operation: Operation, error: PlexRLError, now: float) -> Failure:
    """What is to be acknowledged after `operation` failed: itself, or the failure it failed of."""
    if isinstance(error, EarlierFailureError):
        cause = error.details
        return Failure(
            operation=OperationId(str(cause["operation"])),
            deployment=DeploymentId(str(cause["deployment"])),
            kind=OperationKind(str(cause["kind"])),
            error_json=msgspec.json.encode(cause["cause"]).decode(),
            at=now,
        )
    assert operation.error_json is not None, f"{operation.operation} has not failed"
    return Failure(
        operation=operation.operation,
        deployment=operation.deployment,
        kind=operation.kind,
        error_json=operation.error_json,
        at=now,
    )


def read_error(error_json: str) -> PlexRLError:
    """What a report says went wrong. One that cannot be read is journalled all the same, and must
    not end every replay."""
    try:
        error = from_wire(msgspec.json.decode(error_json, type=dict[str, object]))
    except (ValueError, RecursionError):
        return ExecutionError(f"the run failed, and its report cannot be read: {error_json[:200]}")
    # Only the scheduler finds that an operation failed because of another one.
    return ExecutionError(error.message) if isinstance(error, EarlierFailureError) else error


def earlier_failure(failure: Failure) -> EarlierFailureError:
    """The error of whatever is not carried out because of `failure`."""
    cause = msgspec.json.decode(failure.error_json, type=dict[str, Any])
    return EarlierFailureError(
        f"the {failure.kind.value} {failure.operation!r} of {failure.deployment!r} failed before: "
        f"{cause.get('message')} ({cause.get('code')}). What builds on it is not carried out until "
        "its error is read from its future, or recover() is called",
        operation=failure.operation,
        deployment=failure.deployment,
        kind=failure.kind.value,
        cause=cause,
    )


def failure_view(failure: Failure | None) -> dict[str, Any] | None:
    """`earlier_failure` as plain values."""
    return None if failure is None else earlier_failure(failure).to_wire()


def halting_failure(deployment: Deployment) -> Failure | None:
    """The first failure of a deployment that nobody has acknowledged."""
    return deployment.unacknowledged[0] if deployment.unacknowledged else None


def check_not_halted(deployments: Iterable[Deployment]) -> None:
    """Raises `EarlierFailureError` where one of them has a failure that nobody acknowledged."""
    for deployment in deployments:
        for failure in deployment.unacknowledged:
            if failure.halts:
                raise earlier_failure(failure)


def job_failure(state: State, job: Job) -> Failure | None:
    """The first failure of a job that nobody has acknowledged."""
    found: Failure | None = None
    for name in job.deployments:
        for failure in state.deployments[name].unacknowledged[:1]:
            if found is None or failure.at < found.at:
                found = failure
    return found


def root_of(operation: Operation) -> OperationId:
    """The operation whose failure made this one fail; itself, where there was none before."""
    if operation.error_json is None:
        return operation.operation
    error = msgspec.json.decode(operation.error_json, type=dict[str, Any])
    if error.get("code") != CODE:
        return operation.operation
    return OperationId(error["details"]["operation"])


def acknowledge(state: State, job: Job, operations: Collection[OperationId]) -> None:
    """The controller knows that these failed: what only they halted goes on."""
    for name in job.deployments:
        halting = state.deployments[name].unacknowledged
        halting[:] = [failure for failure in halting if failure.operation not in operations]
