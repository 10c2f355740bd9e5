"""Routing of waiting trajectories to instances (StaleFlow §5.3, Alg. 2 and 3).

The trajectories are ordered by `V_traj`, the oldest first, and initial ones last. The first one
that no instance can take ends the routing, so that no younger one overtakes it.

In the paper a trajectory waits if every instance gains less than mu of an idle one's gain. By the
cost model that is never sooner while an instance has room: a step of two batches together takes at
most as long as a step of one and then of the other. So mu only says here how far older versions
have precedence, and a trajectory that no version takes by mu goes to the instance with the largest
gain. It waits only if it would wait in an engine, too: held, it goes where there is room first.

The paper leaves the order within one version open. Here longer trajectories come first, since they
complete last; of the initial ones, groups that have an entry come first, then older groups.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Protocol

import numpy as np

from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.instances.snapshot import InstanceLoad
from plexrl.rollout.staleness.buffers import Buffers
from plexrl.rollout.trajectories.record import SampleGroupId, Trajectory, TrajectoryId


@dataclass(slots=True)
class RoutingCandidate:
    """A trajectory to be routed."""

    trajectory: TrajectoryId
    group: SampleGroupId
    version: int | None
    """V_traj; None for an initial trajectory."""
    length: int
    """Tokens, prompt included."""


@dataclass(slots=True)
class RoutingChoice:
    """An instance for a candidate; nothing is routed yet."""

    load: InstanceLoad
    score: float
    """The figure that the strategy compares; more is better."""
    is_by_precedence: bool = True
    """Instances of newer versions cannot replace it, whatever they score."""


class Router(Protocol):
    """A routing strategy over one picture of the load."""

    @property
    def lanes(self) -> int:
        """Number of lanes: a candidate that no instance takes holds up only those of its lane."""

    def lane(self, candidate: RoutingCandidate) -> int:
        """The candidate's lane, from 0."""

    def choose(self, candidate: RoutingCandidate) -> RoutingChoice | None:
        """The instance for the candidate; None if no instance takes it now."""

    def comparable_length(self, length: int) -> int:
        """The length by which scores are compared; candidates that share it have equal scores."""

    def score(self, load: InstanceLoad, length: int) -> float | None:
        """Score of a comparable length on this instance; None: the instance would not take it."""

    def would_replace(self, version: int, choice: RoutingChoice | None) -> bool:
        """True if an instance of this version, newer than all others but its equals, would be
        chosen instead if its score were higher."""

    def take(self, candidate: RoutingCandidate, choice: RoutingChoice) -> None:
        """Adds the candidate to the load of the chosen instance."""


def is_routable(buffers: Buffers, candidate: RoutingCandidate, version: int) -> bool:
    """True if the candidate may run on weights of this version (Alg. 2)."""
    if candidate.version is None:
        return buffers.admits(candidate.group, version)
    return candidate.version <= version


class Queue:
    """The multi-level queue. It can be gone through several times.

    Initial trajectories become candidates one by one, since thousands may wait for a version that
    no instance has yet.
    """

    def __init__(
        self,
        assigned: Iterable[RoutingCandidate],
        initial: Iterable[Trajectory] = (),
        is_started: Callable[[SampleGroupId], bool] = lambda _: False,
    ) -> None:
        """`initial`: by id ascending; `is_started`: whether a group has an entry."""
        self._assigned = sorted(assigned, key=lambda c: (c.version or 0, -c.length, c.trajectory))
        self._initial = initial
        self._is_started = is_started

    def __iter__(self) -> Iterator[RoutingCandidate]:
        yield from self._assigned
        for is_first in (True, False):
            for trajectory in self._initial:
                if self._is_started(trajectory.group) is is_first:
                    yield RoutingCandidate(trajectory.id, trajectory.group, None, trajectory.length)


def route(
    router: Router, buffers: Buffers, queue: Iterable[RoutingCandidate]
) -> list[tuple[RoutingCandidate, InstanceLoad]]:
    """Routes from the head of the queue until no instance takes a trajectory of any lane.

    Changes the loads behind the router and the buffers: pass copies.
    """
    routed = []
    blocked: set[int] = set()
    for candidate in queue:
        if blocked and router.lane(candidate) in blocked:
            continue
        choice = router.choose(candidate)
        if choice is None:
            blocked.add(router.lane(candidate))
            if len(blocked) == router.lanes:
                break
            continue
        router.take(candidate, choice)
        if candidate.version is None:
            buffers.assign(candidate.group, choice.load.version)
        routed.append((candidate, choice.load))
    return routed


class _Level:
    """The instances of one version, with their gains for one length."""

    __slots__ = ("budget", "free", "gains", "kv_cache", "length", "loads", "place", "running")

    def __init__(self, loads: list[InstanceLoad]) -> None:
        """`loads`: by index ascending."""
        self.loads = loads
        self.place = {load.index: place for place, load in enumerate(loads)}
        self.kv_cache = np.array([load.kv_cache for load in loads])
        self.budget = np.array([load.kv_budget for load in loads])
        self.running = np.array([float(load.running) for load in loads])
        self.free = np.array([not load.waiting for load in loads])
        self.gains = np.zeros(len(loads))
        self.length = -1

    def compare(self, model: CostModel, length: int) -> None:
        """Computes the gains for this length."""
        gains = model.gains(self.kv_cache, self.running, self.budget, length)
        self.gains = np.where(self.free, gains, -np.inf)
        self.length = length

    def took(self, model: CostModel, load: InstanceLoad) -> None:
        """The load of an instance has changed."""
        place = self.place[load.index]
        self.kv_cache[place] = load.kv_cache
        self.running[place] = load.running
        self.gains[place] = model.gain(load, self.length)


class ThroughputRouter:
    """The instance with the largest gain in throughput: of the oldest version that gains enough,
    or of all versions if none does."""

    lanes = 1

    def __init__(
        self,
        loads: Iterable[InstanceLoad],
        buffers: Buffers,
        model: CostModel,
        *,
        gain_part_min: float,
        length_step: int,
    ) -> None:
        self._buffers = buffers
        self._model = model
        self._gain_part_min = gain_part_min
        self._length_step = length_step
        by_version: dict[int, list[InstanceLoad]] = {}
        for load in sorted(loads, key=lambda load: (load.version, load.index)):
            by_version.setdefault(load.version, []).append(load)
        self._levels = {version: _Level(each) for version, each in by_version.items()}

    def lane(self, candidate: RoutingCandidate) -> int:
        """All are in one."""
        del candidate
        return 0

    def choose(self, candidate: RoutingCandidate) -> RoutingChoice | None:
        """Goes through the versions from the oldest one on (the waterfall of Alg. 3)."""
        length = self.comparable_length(candidate.length)
        least = self._gain_part_min * self._model.ideal_gain(length)
        found: RoutingChoice | None = None
        for version, level in self._levels.items():
            if not is_routable(self._buffers, candidate, version):
                continue
            if level.length != length:
                level.compare(self._model, length)
            best = int(level.gains.argmax())
            gain = float(level.gains[best])
            if gain >= least:
                return RoutingChoice(level.loads[best], gain)
            load = level.loads[best]
            if gain > -math.inf and (
                found is None or (gain, -load.index) > (found.score, -found.load.index)
            ):
                found = RoutingChoice(load, gain, is_by_precedence=False)
        return found

    def comparable_length(self, length: int) -> int:
        """Rounded down, so that what fits into an idle instance is found to fit."""
        return max(length - length % self._length_step, 1)

    def score(self, load: InstanceLoad, length: int) -> float | None:
        """The gain, if there is room."""
        gain = self._model.gain(load, length)
        return gain if gain > -math.inf else None

    def would_replace(self, version: int, choice: RoutingChoice | None) -> bool:
        """Not against an instance of an older version that gains enough."""
        return choice is None or choice.load.version == version or not choice.is_by_precedence

    def take(self, candidate: RoutingCandidate, choice: RoutingChoice) -> None:
        """Adds one trajectory that runs at once, since there is room."""
        load = choice.load
        load.kv_cache += self._model.k5 * candidate.length
        load.running += 1
        self._levels[load.version].took(self._model, load)


class CountRouter:
    """The instance with the fewest trajectories (StaleFlow §6.5, vanilla routing)."""

    lanes = 1

    def __init__(self, loads: Iterable[InstanceLoad], buffers: Buffers, model: CostModel) -> None:
        self._buffers = buffers
        self._model = model
        self._by_version: dict[int, list[tuple[int, int, InstanceLoad]]] = {}
        for load in loads:
            heap = self._by_version.setdefault(load.version, [])
            heap.append((load.count, load.index, load))
        for heap in self._by_version.values():
            heapify(heap)

    def lane(self, candidate: RoutingCandidate) -> int:
        """All are in one."""
        del candidate
        return 0

    def choose(self, candidate: RoutingCandidate) -> RoutingChoice | None:
        """The fewest trajectories among instances of all versions that may run the candidate."""
        tops = [
            heap[0]
            for version, heap in self._by_version.items()
            if is_routable(self._buffers, candidate, version)
        ]
        if not tops:
            return None
        count, _, load = min(tops)
        return RoutingChoice(load, -count)

    def comparable_length(self, length: int) -> int:
        """Lengths do not matter."""
        del length
        return 0

    def score(self, load: InstanceLoad, length: int) -> float | None:
        """The number of trajectories, negative."""
        del length
        return -load.count

    def would_replace(self, version: int, choice: RoutingChoice | None) -> bool:
        """Versions have no precedence."""
        del version, choice
        return True

    def take(self, candidate: RoutingCandidate, choice: RoutingChoice) -> None:
        """Adds one trajectory, which waits where it does not fit."""
        load = choice.load
        if self._model.fits(load, candidate.length):
            load.kv_cache += self._model.k5 * candidate.length
            load.running += 1
        else:
            load.waiting += 1
        heapreplace(self._by_version[load.version], (load.count, load.index, load))
