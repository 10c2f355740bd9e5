"""Highest response ratio with setup (PlexRL §4.4, Eq. 3 and 4), and what it becomes for bursts.

The paper scores single tasks. Here a candidate is a member's burst (the operations of one cycle
that follow each other on its WPG): scored task by task, the resident's next operation has always
waited 0 s and loses to whoever waits, so a cycle is cut into several switches.
"""

from dataclasses import dataclass

WEIGHT_MAX = 8.0
"""A cycle counts as at most this many times the burst that it has waiting. It bounds how far a
member with a long or interrupted cycle can be put back: whoever has waited for 8 times its own
burst is ahead of every newcomer of its length."""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One burst that could have the group next, as it is at one moment: nothing changes it. Frozen
    it would take three times as long to make, and every switch makes some."""

    name: str
    arrived_at: float
    """When the oldest waiting operation of the burst was submitted."""
    service_s: float
    """Estimated seconds of the burst."""
    setup_s: float
    """Estimated seconds of the context switch; 0 for the resident."""
    head_s: float = 0.0
    """Estimated seconds of the burst's next operation alone."""
    cycle_s: float = 0.0
    """Seconds of the cycle that the burst belongs to, had it not to wait; 0: not known."""
    served_at: float = 0.0
    """When the member last had an operation started."""
    priority: int = 0
    """Class of its job: higher goes first."""
    turns_away: int = 0
    """Places behind the holder in the group's fixed cycle of members; the holder itself is last."""


def response_ratio(candidate: Candidate, now: float, service_s: float | None = None) -> float:
    """R = (w + S) / S with S = service + setup, both in seconds.

    `service_s` takes the place of the burst's, where something shorter competes.
    """
    effective_s = _effective_s(candidate.service_s if service_s is None else service_s, candidate)
    return (max(0.0, now - candidate.arrived_at) + effective_s) / effective_s


def urgency(candidate: Candidate, now: float) -> float:
    """R / C: the response ratio of a burst, for each second of its cycle.

    A second of waiting slows a cycle of C seconds down by 1 / C, so among equal ratios the member
    with the shorter cycle loses more by waiting on. Where C is not known, or out of all proportion,
    it is held between S and `WEIGHT_MAX` times S.
    """
    effective_s = _effective_s(candidate.service_s, candidate)
    cycle_s = min(max(candidate.cycle_s, effective_s), WEIGHT_MAX * effective_s)
    return response_ratio(candidate, now) / cycle_s


def _effective_s(service_s: float, candidate: Candidate) -> float:
    return max(service_s + candidate.setup_s, 1e-9)
