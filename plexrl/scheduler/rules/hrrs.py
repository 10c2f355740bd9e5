"""The HRRS score (highest response ratio with setup, PlexRL §4.4, Eq. 3 and 4) and starvation.

The one owner of both rules. The order of dispatch, the slack guard, the contention model and the
order of admission call these functions.

The paper scores single tasks. Here a candidate is a member's burst: the operations of one cycle
that follow each other on its WPG. Scored task by task, the next operation of the resident has
always waited 0 s and loses to every waiting member, so one cycle is cut into several switches.
"""

from dataclasses import dataclass

WEIGHT_MAX = 8.0
"""Upper bound of a cycle's length in the urgency, in multiples of the burst. It bounds how far a
member with a long or interrupted cycle falls behind: once it has waited 8 times its own burst, it
goes before every newcomer with a burst of the same length."""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One burst that competes for the group, as it is at one moment. Never modified; not frozen,
    because a frozen instance takes three times as long to create."""

    name: str
    serial: int = 0
    """Number of the member in the order of creation; breaks ties."""
    arrived_at: float
    """When the oldest waiting operation of the burst was submitted."""
    service_s: float
    """Estimated seconds of the burst."""
    setup_s: float
    """Estimated seconds of the context switch; 0 for the resident."""
    head_s: float = 0.0
    """Estimated seconds of the burst's next operation alone."""
    cycle_s: float = 0.0
    """Seconds of the member's cycle without waiting; 0 if unknown."""
    served_at: float = 0.0
    """When an operation of the member last started."""
    priority: int = 0
    """Priority class of the job; a higher class goes first."""
    share: float = 0.0
    """The tenant's share of the group (`candidates.group_shares`): the least goes first."""
    turns_away: int = 0
    """Positions behind the holder in the group's fixed cycle of members; the holder is last."""


def ratio_of(waited_s: float, effective_s: float) -> float:
    """R = (w + S) / S, with S the estimated service plus setup."""
    return (waited_s + effective_s) / effective_s


def urgency_of(waited_s: float, effective_s: float, cycle_s: float) -> float:
    """R / C: the response ratio per second of the member's cycle.

    A second of waiting slows a cycle of C seconds down by 1 / C, so among equal ratios the member
    with the shorter cycle loses more by waiting. C is clamped to S … `WEIGHT_MAX` · S, which also
    covers an unknown cycle (0).
    """
    longest_s = WEIGHT_MAX * effective_s
    if cycle_s < effective_s:
        cycle_s = effective_s
    elif cycle_s > longest_s:
        cycle_s = longest_s
    return (waited_s + effective_s) / effective_s / cycle_s


def response_ratio(candidate: Candidate, now: float, service_s: float | None = None) -> float:
    """The response ratio of a burst, or of a shorter unit that takes `service_s`."""
    effective_s = _effective_s(candidate.service_s if service_s is None else service_s, candidate)
    return ratio_of(max(0.0, now - candidate.arrived_at), effective_s)


def urgency(candidate: Candidate, now: float) -> float:
    """The urgency of a burst."""
    effective_s = _effective_s(candidate.service_s, candidate)
    waited_s = now - candidate.arrived_at
    return urgency_of(waited_s if waited_s > 0.0 else 0.0, effective_s, candidate.cycle_s)


def waits_since(candidate: Candidate) -> float:
    """Start of the wait that counts towards starvation: the arrival, or the last service if that
    was later. Operations left in the queue of a member that was just served do not starve."""
    arrived_at, served_at = candidate.arrived_at, candidate.served_at
    return served_at if served_at > arrived_at else arrived_at


def starves_at(since: float, bound_s: float) -> float:
    """When a wait that began at `since` passes the starvation bound."""
    return since + bound_s


def guard_ends_at(
    arrived_at: float, since: float, effective_s: float, *, ratio: float, bound_s: float
) -> float:
    """When the slack guard must let a guest start: its response ratio reaches `ratio`, or its wait
    passes the starvation bound."""
    return min(arrived_at + (ratio - 1.0) * effective_s, starves_at(since, bound_s))


def _effective_s(service_s: float, candidate: Candidate) -> float:
    effective_s = service_s + candidate.setup_s
    return effective_s if effective_s > 1e-9 else 1e-9
