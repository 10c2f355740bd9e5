"""Who of a group's members goes next: one small class a rule.

A rule says two things: whether the unit that competes is a member's whole burst (then the lock is
held until the burst is over, or over its bound) or a single operation (then the lock is contested
at every operation boundary); and a key, of which the lowest goes first. Every key ends in the
member's name, so that an order is never a matter of chance.
"""

import math
from collections.abc import Iterable
from typing import Protocol

from plexrl.scheduler.dispatch.hrrs import Candidate, response_ratio, urgency

Key = tuple[float, float, str]


class Ordering(Protocol):
    """Decides which member gets the group next, and whether a burst may be broken up."""

    @property
    def holds_bursts(self) -> bool:
        """Whether a holder keeps the lock until its burst is over."""
        ...

    @property
    def anticipates(self) -> bool:
        """Whether a group that nobody waits for is switched to the member expected next."""
        ...

    def key(self, candidate: Candidate, now: float) -> Key:
        """The candidate of lowest key goes first."""
        ...


class Hrrs:
    """Highest response ratio with setup for a second of cycle, by bursts: PlexRL's own rule."""

    holds_bursts = True
    anticipates = True

    def key(self, candidate: Candidate, now: float) -> Key:
        return (-urgency(candidate, now), candidate.arrived_at, candidate.name)


class HrrsPerOperation:
    """Highest response ratio with setup as PlexRL §4.4 reads: all heads compete every time."""

    holds_bursts = False
    anticipates = False

    def key(self, candidate: Candidate, now: float) -> Key:
        return (
            -response_ratio(candidate, now, candidate.head_s),
            candidate.arrived_at,
            candidate.name,
        )


class FifoBursts:
    """A lock taken for a burst and given out in the order of asking (llm-d)."""

    holds_bursts = True
    anticipates = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.arrived_at, 0.0, candidate.name)


class FifoOperations:
    """First come, first served, operation by operation."""

    holds_bursts = False
    anticipates = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.arrived_at, candidate.setup_s, candidate.name)


class ShortestFirst:
    """The shortest burst, the switch to it not counted (shortest job first)."""

    holds_bursts = True
    anticipates = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.service_s, candidate.arrived_at, candidate.name)


class LeastRecentlyServed:
    """Whoever had the group last the longest ago, a burst at a time (OpenRL)."""

    holds_bursts = True
    anticipates = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.served_at, candidate.arrived_at, candidate.name)


class RoundRobin:
    """The members in a fixed cycle, a burst at a time; whoever has nothing to run is skipped
    (RollMux)."""

    holds_bursts = True
    anticipates = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.turns_away, candidate.arrived_at, candidate.name)


ORDERINGS: dict[str, type[Ordering]] = {
    "hrrs": Hrrs,
    "hrrs-operations": HrrsPerOperation,
    "fifo-bursts": FifoBursts,
    "fifo-operations": FifoOperations,
    "shortest-first": ShortestFirst,
    "least-recently-served": LeastRecentlyServed,
    "round-robin": RoundRobin,
}
"""By the name that `SchedulerConfig.ordering` takes."""


def make_ordering(name: str) -> Ordering:
    """The rule of that name (checked by the configuration)."""
    return ORDERINGS[name]()


Rank = tuple[bool, int, Key]


def rank(ordering: Ordering, candidate: Candidate, now: float, starvation_bound_s: float) -> Rank:
    """What orders candidates, the lowest first: who has waited beyond the bound, in the order of
    waiting, whatever their class; then the higher priority class, then the rule."""
    # What is still in the queue of one that was served lately does not make it starve.
    since = max(candidate.arrived_at, candidate.served_at)
    if now - since >= starvation_bound_s:
        return (False, 0, (since, 0.0, candidate.name))
    return (True, -candidate.priority, ordering.key(candidate, now))


def first(
    ordering: Ordering,
    candidates: Iterable[Candidate],
    now: float,
    starvation_bound_s: float = math.inf,
) -> Candidate | None:
    """The candidate that goes next; None where there is none."""
    return min(candidates, key=lambda c: rank(ordering, c, now, starvation_bound_s), default=None)
