"""Who is busy at the same time as whom on a group, by the plan (PlexRL §4.3.2, Eq. 2).

Whether two footprints share a slot follows from how their cycles can stand to each other, without a
look at the ring; plans follow their jobs all the time, and most only have to know that. In how many
slots a member overlaps is counted when it is asked. Members without a profile give way: they
overlap with nobody, and nobody with them.
"""

import math
from typing import TYPE_CHECKING, Final

from plexrl.scheduler.state.demand import Footprint
from plexrl.scheduler.state.records import Deployment, Group, Reservation

if TYPE_CHECKING:
    from plexrl.scheduler.capacity.index import GroupSlots
    from plexrl.scheduler.core.context import Context
    from plexrl.scheduler.state.demand import DemandTrace

UNCOUNTED_S: Final = math.inf
"""Of an overlap that there is."""

TINY_SLOTS: Final = 1e-6
"""Far below a slot, far above the rounding of a phase."""


def update_reservation(context: "Context", deployment: Deployment, shift: float) -> None:
    """Replace the deployment's footprint by that of its present trace, at `shift` slots."""
    assert deployment.group is not None, f"{deployment.deployment} is on no group"
    group = context.state.groups[deployment.group]
    trace, before = deployment.trace, deployment.reservation
    context.inventory.replace_reservation(deployment, trace, shift)
    slots = context.inventory.index.slots(deployment.group)
    overlap_s = UNCOUNTED_S if _overlaps(context, group, slots, deployment) else 0.0
    deployment.reservation = Reservation(shift=shift, trace=trace, overlap_s=overlap_s)
    if before is None or before.trace is None:
        # The group may take others now.
        context.inventory.refresh(group)
    refresh_overlap_flags(context, group)


def refresh_overlap_flags(context: "Context", group: Group) -> None:
    """A footprint has gone from where it was: whoever overlapped with it only has time of its own
    again."""
    slots = context.inventory.index.slots(group.group)
    for name in group.members:
        member = context.state.deployments[name]
        reservation = member.reservation
        if (
            reservation is not None
            and reservation.overlap_s != 0.0
            and reservation.trace is not None
            and not _overlaps(context, group, slots, member)
        ):
            member.reservation = Reservation(shift=reservation.shift, trace=reservation.trace)


def overlap_s(context: "Context", deployment: Deployment) -> float:
    """Seconds of a cycle in which another member is busy too; 0 for one that had time of its own
    when its plan was laid, or has got it since."""
    reservation = deployment.reservation
    if deployment.group is None or reservation is None or reservation.overlap_s == 0.0:
        return 0.0
    slots = context.inventory.index.slots(deployment.group)
    others = 0
    for name in context.state.groups[deployment.group].members:
        planned = context.state.deployments[name].reservation
        if name != deployment.deployment and planned is not None and planned.trace is not None:
            others |= slots.busy_of(name)
    both = slots.busy_of(deployment.deployment) & others
    return both.bit_count() / slots.footprints[deployment.deployment].cycles


def has_exclusive_slots(member: Deployment) -> bool:
    """Whether the plan holds time free for it that must not be taken: it overlaps with nobody, and
    what it does there delays its job."""
    reservation = member.reservation
    if reservation is None or reservation.overlap_s != 0.0 or reservation.trace is None:
        return False
    return has_critical(reservation.trace)


def has_critical(trace: "DemandTrace") -> bool:
    """Whether there is a segment that cannot wait as long as it lasts."""
    found = False
    for segment in trace.segments:
        found |= segment.slack_s < segment.duration_s
    return found


def meet(one: Footprint, other: Footprint) -> bool:
    """Whether both are busy in a slot of the ring."""
    # Any cycle of the one begins by a multiple of this behind any of the other, plus their shifts'
    # difference.
    apart = one.horizon_slots / math.lcm(one.cycles, other.cycles)
    behind = other.shift - one.shift
    is_close = False
    for offset, duration, _ in one.segments:
        for other_offset, other_duration, _ in other.segments:
            after = (behind + other_offset - offset) % apart
            gap, other_gap = after - duration, apart - after - other_duration
            is_long = duration > TINY_SLOTS and other_duration > TINY_SLOTS
            if is_long and (gap < -TINY_SLOTS or other_gap < -TINY_SLOTS):
                return True
            if gap < 1.0 or other_gap < 1.0:
                # Rounded outward they may be in one slot.
                is_close = True
    return is_close and one.busy() & other.busy() != 0


def _overlaps(
    context: "Context", group: Group, slots: "GroupSlots", deployment: Deployment
) -> bool:
    footprints = slots.footprints
    own = footprints[deployment.deployment]
    for name in group.members:
        planned = context.state.deployments[name].reservation
        if (
            name != deployment.deployment
            and planned is not None
            and planned.trace is not None
            and meet(own, footprints[name])
        ):
            return True
    return False
