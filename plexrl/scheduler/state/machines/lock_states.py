"""The state machine of a group's lock (PlexRL §4.4)."""

from enum import StrEnum
from typing import Final

from plexrl.scheduler.state.machines.transitions import Machine


class LockState(StrEnum):
    """State of a group's lock: whether and how it is held."""

    FREE = "free"
    HELD = "held"
    """A member is the holder."""
    SWITCHING = "switching"
    """The holder is being offloaded for another member."""
    AWAITED = "awaited"
    """No member holds it: the incoming member waits for the offloads on its other groups."""


class LockTrigger(StrEnum):
    """What can happen to a group's lock."""

    GRANTED = "granted"
    SWITCH_BEGAN = "switch_began"
    HANDED_OVER = "handed_over"
    """The holder is offloaded, and another member holds the lock."""
    VACATED = "vacated"
    """The holder is offloaded, and another member awaits further offloads."""
    SWITCH_ENDED = "switch_ended"
    """The incoming member left, or the offload changed nothing: the holder keeps the lock."""
    RELEASED = "released"


TRANSITIONS: dict[tuple[LockState, LockTrigger], LockState] = {
    (LockState.FREE, LockTrigger.GRANTED): LockState.HELD,
    (LockState.HELD, LockTrigger.SWITCH_BEGAN): LockState.SWITCHING,
    (LockState.SWITCHING, LockTrigger.HANDED_OVER): LockState.HELD,
    (LockState.SWITCHING, LockTrigger.SWITCH_ENDED): LockState.HELD,
    (LockState.HELD, LockTrigger.RELEASED): LockState.FREE,
    # The holder's processes are lost, or the incoming member is not ready when the offload ends.
    (LockState.SWITCHING, LockTrigger.RELEASED): LockState.FREE,
    (LockState.FREE, LockTrigger.SWITCH_BEGAN): LockState.AWAITED,
    (LockState.SWITCHING, LockTrigger.VACATED): LockState.AWAITED,
    (LockState.AWAITED, LockTrigger.HANDED_OVER): LockState.HELD,
    (LockState.AWAITED, LockTrigger.SWITCH_ENDED): LockState.FREE,
}

next_state: Final = Machine("group lock", TRANSITIONS).next_state
"""See `Machine.next_state`."""
