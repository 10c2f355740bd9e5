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
from plexrl.scheduler.operations.operations import abort, fail_queued, interrupt
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.operations import OperationKind, OperationState


def cancel(step: Step, operation: Operation) -> None:
    """Cancel an operation.

    Raises:
        ConflictError: it runs, and cannot be stopped.
    """
    if operation.state.is_final:
        return
    if operation.state == OperationState.PENDING:
        fail_queued(step, operation, early_end(operation, step.now))
        return
    if operation.kind != OperationKind.GENERATE:
        raise ConflictError(
            f"a running {operation.kind.value} cannot be cancelled: wait for its result"
        )
    _end_run(step, operation)


def interrupt_all(step: Step, filler: Deployment) -> None:
    """Have the filler's generations end after their present token."""
    for name, command in filler.work.running.items():
        operation = step.state.operations[name]
        if command.kind is OperationKind.GENERATE and not (
            operation.is_interrupted or operation.is_aborted
        ):
            operation.is_interrupted = True
            interrupt(step.effects, command)


def stop_rows(step: Step, operation: Operation, rows: tuple[int, ...]) -> None:
    """Stop some rows of a generation; the others go on. Rows of a pending one never draw a token,
    also if it is pending because its run is to be repeated.

    Raises:
        ConflictError: it has no rows, or they cannot be stopped one by one.
    """
    state = step.state
    if operation.kind != OperationKind.GENERATE:
        raise ConflictError(
            f"operation {operation.operation!r} is a {operation.kind.value}, and only a generate "
            "has rows that can be stopped: cancel the operation"
        )
    if operation.state.is_final:
        return
    if state.deployment(operation.deployment).spec.preemptible:
        raise ConflictError(
            f"generation {operation.operation!r} is of a preemptible deployment, whose rows are "
            "not stopped one by one: cancel the operation"
        )
    operation.stopped_rows = tuple(sorted({*operation.stopped_rows, *rows}))
    if operation.state == OperationState.RUNNING:
        deployment = state.deployment(operation.deployment)
        abort(step.effects, deployment.work.running[operation.operation], rows)


def await_deadline(effects: Effects, operation: Operation) -> None:
    """Set a timer for the deadline, if there is one."""
    if operation.deadline_at is not None:
        effects.wake(operation.deadline_at, timers.deadline(operation.operation))


def deadline_passed(step: Step, name: OperationId) -> None:
    """End an operation at its deadline, unless it has ended before."""
    state, now = step.state, step.now
    operation = state.operations.get(name)
    if operation is None or operation.state.is_final:
        return
    if operation.deadline_at is None or now < operation.deadline_at:
        # Another operation with the same id, after the first one left the history.
        return
    if operation.state == OperationState.PENDING:
        fail_queued(step, operation, early_end(operation, now))
    elif operation.kind == OperationKind.GENERATE and not operation.is_aborted:
        _end_run(step, operation)


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


def _end_run(step: Step, operation: Operation) -> None:
    operation.is_aborted = True
    deployment = step.state.deployment(operation.deployment)
    abort(step.effects, deployment.work.running[operation.operation])
