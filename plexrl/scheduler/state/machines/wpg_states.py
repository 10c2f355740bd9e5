"""The state machine of a WPG's processes."""

from enum import StrEnum
from typing import Final

from plexrl.scheduler.state.machines.transitions import Machine


class WpgState(StrEnum):
    """Life of a WPG's processes."""

    WAITING = "waiting"
    """It has no GPUs."""
    LAUNCHING = "launching"
    READY = "ready"
    RECOVERING = "recovering"
    """Launching again after a loss or a move."""
    MIGRATING = "migrating"
    """Its durable version is being copied to other nodes; its processes start after that."""
    STOPPED = "stopped"


class WpgTrigger(StrEnum):
    """What can happen to a WPG's processes."""

    PLACED = "placed"
    """It got its first GPUs."""
    RESUMED = "resumed"
    """It got other GPUs, and its nodes hold the durable version."""
    MIGRATED = "migrated"
    """It got other GPUs, and its nodes lack the durable version."""
    CONNECTED = "connected"
    """All its processes are ready."""
    INTERRUPTED = "interrupted"
    """Its processes were given up, and are started again."""
    DISPLACED = "displaced"
    """It lost its GPUs, and waits for others."""
    ENDED = "ended"
    """It was ended, or its job was."""


_WAITING = WpgState.WAITING
_LAUNCHING = WpgState.LAUNCHING
_READY = WpgState.READY
_RECOVERING = WpgState.RECOVERING
_MIGRATING = WpgState.MIGRATING
_PLACED = (_LAUNCHING, _READY, _RECOVERING, _MIGRATING)

TRANSITIONS: dict[tuple[WpgState, WpgTrigger], WpgState] = {
    (_WAITING, WpgTrigger.PLACED): _LAUNCHING,
    (_WAITING, WpgTrigger.RESUMED): _RECOVERING,
    (_READY, WpgTrigger.RESUMED): _RECOVERING,
    (_MIGRATING, WpgTrigger.RESUMED): _RECOVERING,
    (_WAITING, WpgTrigger.MIGRATED): _MIGRATING,
    (_READY, WpgTrigger.MIGRATED): _MIGRATING,
    # The version that was being copied is damaged, and an earlier one is copied instead.
    (_MIGRATING, WpgTrigger.MIGRATED): _MIGRATING,
    (_LAUNCHING, WpgTrigger.CONNECTED): _READY,
    (_RECOVERING, WpgTrigger.CONNECTED): _READY,
    (_LAUNCHING, WpgTrigger.INTERRUPTED): _RECOVERING,
    (_READY, WpgTrigger.INTERRUPTED): _RECOVERING,
    # The processes that were starting again were lost too.
    (_RECOVERING, WpgTrigger.INTERRUPTED): _RECOVERING,
    **{(state, WpgTrigger.DISPLACED): _WAITING for state in _PLACED},
    **{(state, WpgTrigger.ENDED): WpgState.STOPPED for state in (_WAITING, *_PLACED)},
}

next_state: Final = Machine("WPG", TRANSITIONS).next_state
"""See `Machine.next_state`."""
