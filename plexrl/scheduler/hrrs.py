"""Highest response ratio with setup (PlexRL §4.4, Eq. 3 and 4).

The paper scores single tasks. Here a candidate is a member's burst (the operations of one cycle
that follow each other on its WPG): scored task by task, the resident's next operation has always
waited 0 s and loses to whoever waits, so a cycle is cut into several switches.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One burst that could have the group next."""

    name: str
    arrived_at: float
    """When the oldest waiting operation of the burst was submitted."""
    service_s: float
    """Estimated seconds of the burst."""
    setup_s: float
    """Estimated seconds of the context switch; 0 for the resident."""


def response_ratio(candidate: Candidate, now: float) -> float:
    """R = (w + S) / S with S = service + setup, both in seconds."""
    effective_s = max(candidate.service_s + candidate.setup_s, 1e-9)
    return (max(0.0, now - candidate.arrived_at) + effective_s) / effective_s


def highest(candidates: Iterable[Candidate], now: float) -> Candidate | None:
    """The candidate of highest ratio; the earliest arrival, then the name, breaks ties."""
    return min(
        candidates,
        key=lambda c: (-response_ratio(c, now), c.arrived_at, c.name),
        default=None,
    )
