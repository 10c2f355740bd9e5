"""The operation's state machine; its states are those of the wire format."""

from enum import StrEnum
from typing import Final

from plexrl.scheduler.state.machines.transitions import Machine
from plexrl.wire.operations import OperationState


class OperationTrigger(StrEnum):
    """What can happen to an operation."""

    STARTED = "started"
    """It was sent to its WPG."""
    REQUEUED = "requeued"
    """Its run was interrupted, or is to be tried again."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_PENDING = OperationState.PENDING
_RUNNING = OperationState.RUNNING
_LIVE = (_PENDING, _RUNNING)

TRANSITIONS: dict[tuple[OperationState, OperationTrigger], OperationState] = {
    (_PENDING, OperationTrigger.STARTED): _RUNNING,
    (_RUNNING, OperationTrigger.REQUEUED): _PENDING,
    (_RUNNING, OperationTrigger.FINISHED): OperationState.FINISHED,
    **{(state, OperationTrigger.FAILED): OperationState.FAILED for state in _LIVE},
    **{(state, OperationTrigger.CANCELLED): OperationState.CANCELLED for state in _LIVE},
}

_MACHINE: Final = Machine("operation", TRANSITIONS)

next_state: Final = _MACHINE.next_state
"""See `Machine.next_state`."""
AFTER: Final = _MACHINE.after
"""The state after each trigger, by the state before it."""
