"""Which instances pull the newest parameters (StaleFlow §5.3, Alg. 4).

An instance pulls if it lags behind the parameter server, can take no waiting trajectory as it is,
and would get one after the pull. The paper simulates the routing once for each such instance. Here
one walk serves all: until an instance gets its first trajectory, its simulation equals the routing
without it, so each step of that routing asks every instance whether it would be chosen instead.

As in the paper, the simulation keeps the instance's load, and instances are asked independently of
each other. One case is added, since the paper's rule would wait for ever in it: where the next
trajectory in the queue is too new for every instance (its instance was lost), all that lag are
asked, even if they could take a later trajectory.
"""

from collections.abc import Sequence

from plexrl.rollout.coordinator.cost_model import CostModel
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.coordinator.snapshot import InstanceLoad
from plexrl.rollout.coordinator.strategies.routing import (
    Candidate,
    Choice,
    Router,
    is_routable,
    make_router,
)
from plexrl.rollout.staleness.buffers import Buffers


def to_synchronise(
    settings: CoordinatorSettings,
    model: CostModel,
    loads: Sequence[InstanceLoad],
    buffers: Buffers,
    queue: Sequence[Candidate],
    newest: int,
) -> list[InstanceLoad]:
    """The instances that pull version `newest`. Changes the buffers and the loads: pass copies."""
    lagging = [load for load in loads if load.version < newest]
    if settings.synchronisation == "greedy" or not lagging:
        return lagging
    useless = _versions_without_work({load.version for load in lagging}, buffers, queue)
    newest_loaded = max(load.version for load in loads)
    too_new = any(c.version is not None and c.version > newest_loaded for c in queue)
    router = make_router(settings, model, loads, buffers)
    asked = _Asked(router, [load for load in lagging if load.version in useless])
    for candidate in queue:
        if not asked.remaining and not too_new:
            break
        choice = router.choose(candidate)
        if candidate.version is not None and candidate.version > newest_loaded:
            asked.add(lagging)
        if is_routable(buffers, candidate, newest) and router.would_replace(newest, choice):
            asked.accept(candidate, choice)
        if choice is None:
            break
        router.take(candidate, choice)
        if candidate.version is None:
            buffers.assign(candidate.group, choice.load.version)
    return sorted(asked.accepted.values(), key=lambda load: load.index)


class _Asked:
    """Instances that would pull, and those of them that would get a trajectory then."""

    def __init__(self, router: Router, loads: Sequence[InstanceLoad]) -> None:
        self.accepted: dict[int, InstanceLoad] = {}
        self.remaining = {load.index: load for load in loads}
        self._router = router
        self._ranked: dict[int, list[tuple[float, int]]] = {}
        """(score, -index) by comparable length, the best one last: these loads do not change."""

    def add(self, loads: Sequence[InstanceLoad]) -> None:
        """Asks more instances."""
        self._ranked.clear()
        new = {load.index: load for load in loads if load.index not in self.accepted}
        self.remaining.update(new)

    def accept(self, candidate: Candidate, choice: Choice | None) -> None:
        """Accepts those that would be chosen for the candidate instead of the choice."""
        length = self._router.comparable_length(candidate.length)
        ranked = self._ranked.get(length)
        if ranked is None:
            scores = ((self._router.score(load, length), i) for i, load in self.remaining.items())
            ranked = sorted((score, -i) for score, i in scores if score is not None)
            self._ranked[length] = ranked
        least = None if choice is None else (choice.score, -choice.load.index)
        while ranked and (least is None or ranked[-1] > least):
            index = -ranked.pop()[1]
            if index in self.remaining:
                self.accepted[index] = self.remaining.pop(index)


def _versions_without_work(
    versions: set[int], buffers: Buffers, queue: Sequence[Candidate]
) -> set[int]:
    """Those of the versions that may run no trajectory of the queue."""
    oldest = min((c.version for c in queue if c.version is not None), default=None)
    groups = {c.group for c in queue if c.version is None}
    return {
        version
        for version in versions
        if (oldest is None or oldest > version)
        and not any(buffers.admits(group, version) for group in groups)
    }
