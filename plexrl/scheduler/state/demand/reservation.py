"""The time of a group that is reserved for a member."""

from dataclasses import dataclass

from plexrl.scheduler.state.demand.trace import DemandTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The time of a group that is reserved for a member."""

    shift: float
    """Slots from the ring's start to the start of one of its cycles."""
    trace: DemandTrace | None
    """None: all of the time, because there is no profile."""
    overlap_s: float = 0.0
    """Planned seconds of a cycle in which another member is busy too, at the time of the
    reservation; infinite if they were not counted, 0 if the other members have left. Above 0, the
    member yields to the others."""
