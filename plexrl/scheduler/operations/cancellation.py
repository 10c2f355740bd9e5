"""Cancellation and deadlines of operations.

A cancelled operation in a queue never runs. A running generation is stopped and returns its tokens
so far, which changes no state. Other running operations are finished, because stopping one would
lose the WPG's state.
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
    """Cancel an operation.

    Raises:
        ConflictError: it runs, and cannot be stopped.
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
    """Set a timer for the deadline, if there is one."""
    if operation.deadline_at is not None:
        context.wake(operation.deadline_at, timers.deadline(operation.operation))


def deadline_passed(context: Context, name: OperationId, now: float) -> None:
    """End an operation at its deadline, unless it has ended before."""
    operation = context.state.operations.get(name)
    if operation is None or operation.state.is_final:
        return
    if operation.deadline_at is None or now < operation.deadline_at:
        # Another operation with the same id, after the first one left the history.
        return
    if operation.state == OperationState.PENDING:
        fail_queued(context, operation, early_end(operation, now), now)
    elif operation.kind == OperationKind.GENERATE and not operation.is_aborted:
        _end_run(context, operation)


def is_over(operation: Operation, now: float) -> bool:
    """Whether an interrupted operation must not start again: it was cancelled, or is past its
    deadline."""
    deadline_at = operation.deadline_at
    return operation.is_aborted or (deadline_at is not None and now >= deadline_at)


def early_end(operation: Operation, now: float) -> PlexRLError:
    """The error of an operation that ends early."""
    if operation.deadline_at is None or now < operation.deadline_at:
        return OperationCancelledError(f"operation {operation.operation!r} was cancelled")
    given_s = operation.deadline_at - operation.submitted_at
    return DeadlineExceededError(
        f"operation {operation.operation!r} was not carried out within its deadline of "
        f"{given_s:g} s: set a longer deadline, or see with `explain` what it waits for",
        deadline_s=given_s,
    )


def abort(context: Context, command: RunOperation) -> None:
    """Have the workers stop a run, which returns its tokens so far."""
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
