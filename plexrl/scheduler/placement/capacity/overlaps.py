"""Overlaps between the planned busy slots of a group's members (PlexRL §4.3.2, Eq. 2).

Whether two footprints share a slot follows from the relative positions that their cycles can have,
without a look at the ring. Plans change often and mostly need only this test; the number of shared
slots is counted on request. Members without a profile count as overlapping with nobody.
"""

import math
from typing import Final

from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.state.demand.reservation import Reservation
from plexrl.scheduler.state.demand.trace import Footprint
from plexrl.scheduler.state.records import Deployment, Group

UNCOUNTED_S: Final = math.inf
"""Marks an overlap whose length was not counted."""

TINY_SLOTS: Final = 1e-5
"""Far below a slot, above the edges of segments that take no slot (`EDGE_PARTS`)."""


def update_reservation(capacity: Capacity, deployment: Deployment, shift: float) -> None:
    """Replace the deployment's reservation by its present trace at `shift` slots."""
    trace, before = deployment.demand.trace, deployment.placement.reservation
    capacity.inventory.replace_reservation(deployment, trace, shift)
    overlaps = trace is not None and _overlaps_any(capacity, deployment)
    overlap_s = UNCOUNTED_S if overlaps else 0.0
    reservation = Reservation(shift=shift, trace=trace, overlap_s=overlap_s)
    deployment.placement.reserve(reservation)
    groups = capacity.state.groups_of(deployment)
    for group in groups:
        if trace is None or before is None or before.trace is None:
            # The group may accept members now, or none any more.
            capacity.inventory.refresh(group)
    for group in groups:
        refresh_overlap_flags(capacity, group)


def follow(capacity: Capacity, deployment: Deployment) -> None:
    """Plan the deployment by its present trace, from where its newest cycle began."""
    cycles, reservation = deployment.demand.cycles, deployment.placement.reservation
    if cycles.open is not None:
        since = cycles.open.started_at
    elif cycles.measured:
        since = cycles.measured[-1].started_at
    else:
        assert reservation is not None, f"{deployment.deployment} has no plan and no cycle"
        since = reservation.shift
    update_reservation(capacity, deployment, since % capacity.settings.config.horizon_slots)


def refresh_overlap_flags(capacity: Capacity, group: Group) -> None:
    """Clear the overlap flag of members that no longer overlap, after a footprint moved."""
    for name in group.members:
        member = capacity.state.deployments[name]
        reservation = member.placement.reservation
        if (
            reservation is not None
            and reservation.overlap_s != 0.0
            and reservation.trace is not None
            and not _overlaps_any(capacity, member)
        ):
            member.placement.reserve(Reservation(shift=reservation.shift, trace=reservation.trace))


def overlap_s(capacity: Capacity, deployment: Deployment) -> float:
    """Seconds of the deployment's cycle in which another member is busy too, by the plan."""
    reservation = deployment.placement.reservation
    if not deployment.placement.groups or reservation is None or reservation.overlap_s == 0.0:
        return 0.0
    others = 0
    for group in capacity.state.groups_of(deployment):
        slots = capacity.inventory.index.slots(group.group)
        for name in group.members:
            planned = capacity.state.deployments[name].placement.reservation
            if name != deployment.deployment and planned is not None and planned.trace is not None:
                others |= slots.busy_of(name)
    both = slots.busy_of(deployment.deployment) & others
    return both.bit_count() / slots.footprints[deployment.deployment].cycles


def has_exclusive_slots(member: Deployment) -> bool:
    """Whether the member's planned slots are reserved for it: no other plan overlaps with them, and
    a delay there would delay its job."""
    reservation = member.placement.reservation
    if reservation is None or reservation.overlap_s != 0.0 or reservation.trace is None:
        return False
    return reservation.trace.has_critical


def footprints_overlap(one: Footprint, other: Footprint) -> bool:
    """Whether both are busy in some slot of the ring."""
    # The starts of two cycles differ by the difference of the shifts plus a multiple of this.
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
                # Rounded outward they may share a slot.
                is_close = True
    return is_close and one.busy() & other.busy() != 0


def _overlaps_any(capacity: Capacity, deployment: Deployment) -> bool:
    """Whether its plan overlaps with that of another member of one of its groups."""
    for group in capacity.state.groups_of(deployment):
        footprints = capacity.inventory.index.slots(group.group).footprints
        own = footprints[deployment.deployment]
        for name in group.members:
            planned = capacity.state.deployments[name].placement.reservation
            if (
                name != deployment.deployment
                and planned is not None
                and planned.trace is not None
                and footprints_overlap(own, footprints[name])
            ):
                return True
    return False
