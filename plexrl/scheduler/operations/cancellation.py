"""Operations that end before their work is done: cancelled, or past their deadline.

One that has not begun never runs. A generation that runs is ended with what it has, which changes
no state; anything else that runs is finished, because to stop it would cost the WPG's state.
"""

from plexrl.errors import (
    ConflictError,
    DeadlineExceededError,
    OperationCancelledError,
    PlexRLError,
)
from plexrl.ids import OperationId
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.operations.operations import fail_queued
from plexrl.scheduler.state import timers
from plexrl.scheduler.state.commands import AbortOperation, RunOperation
from plexrl.scheduler.state.operation import Operation
from plexrl.wire.operations import OperationKind, OperationState


def cancel(context: Context, operation: Operation, now: float) -> None:
    """Whoever asked for the operation does not want it any more.

    Raises:
        ConflictError: it runs, and is finished.
    """
    if operation.state.is_final:
        return
    if operation.state == OperationState.PENDING:
        fail_queued(context, operation, early_end(operation, now), now)
        return
    if operation.kind != OperationKind.GENERATE:
        raise ConflictError(
            f"a running {operation.kind.value} cannot be cancelled: wait for its result"
        )
    _end_run(context, operation)


def await_deadline(context: Context, operation: Operation) -> None:
    """Have `deadline_passed` called in time, if there is a deadline."""
    if operation.deadline_at is not None:
        context.wake(operation.deadline_at, timers.deadline(operation.operation))


def deadline_passed(context: Context, name: OperationId, now: float) -> None:
    """The operation has had the time that its caller gave it; one that has ended is forgotten."""
    operation = context.state.operations.get(name)
    if operation is None or operation.state.is_final:
        return
    if operation.deadline_at is None or now < operation.deadline_at:
        # Another operation under the same id, after the first had left the history.
        return
    if operation.state == OperationState.PENDING:
        fail_queued(context, operation, early_end(operation, now), now)
    elif operation.kind == OperationKind.GENERATE and not operation.is_aborted:
        _end_run(context, operation)


def is_over(operation: Operation, now: float) -> bool:
    """Whether an operation that was not carried out is not to be begun again: its end was asked
    for, or its deadline has passed."""
    deadline_at = operation.deadline_at
    return operation.is_aborted or (deadline_at is not None and now >= deadline_at)


def early_end(operation: Operation, now: float) -> PlexRLError:
    """Why an operation that has not been carried out ends."""
    if operation.deadline_at is None or now < operation.deadline_at:
        return OperationCancelledError(f"operation {operation.operation!r} was cancelled")
    given_s = operation.deadline_at - operation.submitted_at
    return DeadlineExceededError(
        f"operation {operation.operation!r} was not carried out in the {given_s:g} s that it was "
        "given: give it more, or see by `explain` what such operations wait for",
        deadline_s=given_s,
    )


def abort(context: Context, command: RunOperation) -> None:
    """Have the workers end a run with what it has."""
    context.emit(
        AbortOperation(
            operation=command.operation,
            deployment=command.deployment,
            addresses=command.addresses,
        )
    )


def _end_run(context: Context, operation: Operation) -> None:
    operation.is_aborted = True
    deployment = context.deployment(operation.deployment)
    abort(context, deployment.running[operation.operation])
