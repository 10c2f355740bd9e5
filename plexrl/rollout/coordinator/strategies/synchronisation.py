"""Which instances pull the newest parameters (StaleFlow §5.3, Alg. 4).

An instance pulls if it lags behind the parameter server, the routing gives it nothing as it is, and
would give it something after the pull. The paper simulates the routing once for each instance. Here
one walk serves all: until an instance gets its first trajectory, its simulation equals the routing
without it, so each step of that routing asks every instance whether it would be chosen instead.

As in the paper, the simulation keeps the instance's load, and instances are asked independently of
each other. The paper asks only instances whose version no waiting trajectory may have. That leaves
out an idle instance which could run a trajectory further back in the queue, behind one that is too
new for it: it would stay idle until others make room, and for ever if those were lost.
"""

from collections.abc import Iterable, Sequence

from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.coordinator.strategies.length_aware import Sides, make_router
from plexrl.rollout.coordinator.strategies.routing import (
    Router,
    RoutingCandidate,
    RoutingChoice,
    is_routable,
)
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.instances.snapshot import InstanceLoad
from plexrl.rollout.staleness.buffers import Buffers


def to_synchronise(
    settings: CoordinatorSettings,
    model: CostModel,
    loads: Sequence[InstanceLoad],
    buffers: Buffers,
    queue: Iterable[RoutingCandidate],
    newest: int,
    sides: Sides | None = None,
) -> list[InstanceLoad]:
    """The instances that pull version `newest`. Changes the buffers and the loads: pass copies."""
    lagging = [load for load in loads if load.version < newest]
    if settings.synchronisation == "greedy" or not lagging:
        return lagging
    router = make_router(settings, model, loads, buffers, sides)
    asked = _Asked(router, lagging)
    blocked: set[int] = set()
    for candidate in queue:
        if not asked.remaining and not asked.accepted:
            break
        if blocked and router.lane(candidate) in blocked:
            continue
        choice = router.choose(candidate)
        if is_routable(buffers, candidate, newest) and router.would_replace(newest, choice):
            asked.accept(candidate, choice)
        if choice is None:
            blocked.add(router.lane(candidate))
            if len(blocked) == router.lanes:
                break
            continue
        asked.remove(choice.load)
        router.take(candidate, choice)
        if candidate.version is None:
            buffers.assign(candidate.group, choice.load.version)
    return sorted(asked.accepted.values(), key=lambda load: load.index)


class _Asked:
    """Instances that lag and get nothing, and those of them that would get something."""

    def __init__(self, router: Router, loads: Sequence[InstanceLoad]) -> None:
        self.accepted: dict[int, InstanceLoad] = {}
        self.remaining = {load.index: load for load in loads}
        self._router = router
        self._ranked: dict[int, list[tuple[float, int]]] = {}
        """(score, -index) by comparable length, the best one last: these loads do not change."""

    def remove(self, load: InstanceLoad) -> None:
        """The instance gets a trajectory as it is."""
        self.accepted.pop(load.index, None)
        self.remaining.pop(load.index, None)

    def accept(self, candidate: RoutingCandidate, choice: RoutingChoice | None) -> None:
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
