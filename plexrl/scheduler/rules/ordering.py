"""The order of a group's members: one small class for each rule.

A rule decides two things. First, the unit that competes: a whole burst (the holder keeps the lock
until the burst ends or reaches its bound) or a single operation (the lock is contested at every
operation boundary). Second, a key; the lowest key goes first. Every key ends in the member's name,
so the order is deterministic.
"""

import math
from collections.abc import Iterable
from typing import Protocol

from plexrl.scheduler.rules.hrrs import (
    Candidate,
    response_ratio,
    starves_at,
    urgency,
    waits_since,
)

Key = tuple[float, float, int, str]


class Ordering(Protocol):
    """Decides which member gets the group next, and whether a burst may be interrupted."""

    @property
    def holds_bursts(self) -> bool:
        """Whether a holder keeps the lock until its burst is over."""
        ...

    @property
    def anticipates(self) -> bool:
        """Whether an idle group switches to the member that is expected next."""
        ...

    @property
    def shares_fairly(self) -> bool:
        """Whether tenants that always have work waiting share the group by their weights."""
        ...

    def key(self, candidate: Candidate, now: float) -> Key:
        """The candidate with the lowest key goes first."""
        ...


class Hrrs:
    """Highest response ratio with setup per second of cycle, by bursts: PlexRL's own rule."""

    holds_bursts = True
    anticipates = True
    shares_fairly = True

    def key(self, candidate: Candidate, now: float) -> Key:
        return (-urgency(candidate, now), candidate.arrived_at, candidate.serial, candidate.name)


class HrrsPerOperation:
    """Highest response ratio with setup, read literally (PlexRL §4.4): the next operations of all
    members compete every time."""

    holds_bursts = False
    anticipates = False
    shares_fairly = False

    def key(self, candidate: Candidate, now: float) -> Key:
        return (
            -response_ratio(candidate, now, candidate.head_s),
            candidate.arrived_at,
            candidate.serial,
            candidate.name,
        )


class FifoBursts:
    """First come, first served, by bursts: a lock granted in the order of requests (llm-d)."""

    holds_bursts = True
    anticipates = False
    shares_fairly = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.arrived_at, 0.0, candidate.serial, candidate.name)


class FifoOperations:
    """First come, first served, by operations."""

    holds_bursts = False
    anticipates = False
    shares_fairly = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.arrived_at, candidate.setup_s, candidate.serial, candidate.name)


class ShortestFirst:
    """Shortest job first, by bursts; the switch does not count."""

    holds_bursts = True
    anticipates = False
    shares_fairly = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.service_s, candidate.arrived_at, candidate.serial, candidate.name)


class LeastRecentlyServed:
    """The member served longest ago, by bursts (OpenRL)."""

    holds_bursts = True
    anticipates = False
    shares_fairly = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.served_at, candidate.arrived_at, candidate.serial, candidate.name)


class RoundRobin:
    """The members in a fixed cycle, by bursts; a member without work is skipped (RollMux)."""

    holds_bursts = True
    anticipates = False
    shares_fairly = False

    def key(self, candidate: Candidate, now: float) -> Key:
        del now
        return (candidate.turns_away, candidate.arrived_at, candidate.serial, candidate.name)


ORDERINGS: dict[str, type[Ordering]] = {
    "hrrs": Hrrs,
    "hrrs-operations": HrrsPerOperation,
    "fifo-bursts": FifoBursts,
    "fifo-operations": FifoOperations,
    "shortest-first": ShortestFirst,
    "least-recently-served": LeastRecentlyServed,
    "round-robin": RoundRobin,
}
"""The values of `SchedulerConfig.ordering`."""


def make_ordering(name: str) -> Ordering:
    """The rule with that name; the configuration has checked the name."""
    return ORDERINGS[name]()


SortKey = tuple[bool, int, float, Key]


def sort_key(
    ordering: Ordering, candidate: Candidate, now: float, starvation_bound_s: float
) -> SortKey:
    """The order of candidates, lowest first: starving candidates of any class by the length of
    their wait, then the higher priority class, then the tenant's share, then the rule's key."""
    since = waits_since(candidate)
    if now >= starves_at(since, starvation_bound_s):
        return (False, 0, 0.0, (since, 0.0, candidate.serial, candidate.name))
    return (True, -candidate.priority, candidate.share, ordering.key(candidate, now))


def first(
    ordering: Ordering,
    candidates: Iterable[Candidate],
    now: float,
    starvation_bound_s: float = math.inf,
) -> Candidate | None:
    """The candidate that goes next; None if there is none."""
    best, least = None, None
    for candidate in candidates:
        key = sort_key(ordering, candidate, now, starvation_bound_s)
        if least is None or key < least:
            best, least = candidate, key
    return best
