"""The state machine of a WPG's residency: where the training state of its processes lies."""

from enum import StrEnum
from typing import Final

from plexrl.scheduler.state.machines.transitions import Machine


class Residency(StrEnum):
    """Where a WPG's state lies."""

    NONE = "none"
    """No process holds state; the StateManager may hold version `durable_seq`."""
    DEVICE = "device"
    OFFLOADED = "offloaded"
    """The processes live, and have given their GPU memory back."""
    MOVING = "moving"


class ResidencyTrigger(StrEnum):
    """What can happen to a WPG's state."""

    LOAD_BEGAN = "load_began"
    LOADED = "loaded"
    LOAD_REFUSED = "load_refused"
    """A load of a durable version changed nothing."""
    FIRST_LOAD_REFUSED = "first_load_refused"
    """A load of the initial weights changed nothing."""
    OFFLOAD_BEGAN = "offload_began"
    OFFLOADED = "offloaded"
    OFFLOAD_REFUSED = "offload_refused"
    """An offload changed nothing."""
    PROCESSES_GONE = "processes_gone"


_NONE = Residency.NONE
_DEVICE = Residency.DEVICE
_OFFLOADED = Residency.OFFLOADED
_MOVING = Residency.MOVING

TRANSITIONS: dict[tuple[Residency, ResidencyTrigger], Residency] = {
    (_NONE, ResidencyTrigger.LOAD_BEGAN): _MOVING,
    (_OFFLOADED, ResidencyTrigger.LOAD_BEGAN): _MOVING,
    (_MOVING, ResidencyTrigger.LOADED): _DEVICE,
    (_MOVING, ResidencyTrigger.LOAD_REFUSED): _OFFLOADED,
    (_MOVING, ResidencyTrigger.FIRST_LOAD_REFUSED): _NONE,
    (_DEVICE, ResidencyTrigger.OFFLOAD_BEGAN): _MOVING,
    (_MOVING, ResidencyTrigger.OFFLOADED): _OFFLOADED,
    (_MOVING, ResidencyTrigger.OFFLOAD_REFUSED): _DEVICE,
    # A WPG without processes, or with processes that never loaded, may be stopped too.
    **{(state, ResidencyTrigger.PROCESSES_GONE): _NONE for state in Residency},
}

next_residency: Final = Machine("residency", TRANSITIONS).next_state
"""See `Machine.next_state`."""
