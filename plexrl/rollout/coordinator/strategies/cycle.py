"""One cycle: the decisions of the three strategies on one snapshot (StaleFlow Alg. 1)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.coordinator.strategies.length_aware import longest_first, make_router, sides
from plexrl.rollout.coordinator.strategies.migration import to_migrate
from plexrl.rollout.coordinator.strategies.routing import Queue, RoutingCandidate, route
from plexrl.rollout.coordinator.strategies.synchronisation import to_synchronise
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.instances.snapshot import InstanceLoad, InstanceSnapshot
from plexrl.rollout.staleness.buffers import Buffers
from plexrl.rollout.trajectories.record import InstanceId, TrajectoryId
from plexrl.rollout.trajectories.server import TrajectoryServer


@dataclass(slots=True)
class CycleDecision:
    """The commands of a cycle; interrupts come first, then pulls, then routes."""

    interrupts: dict[InstanceId, list[TrajectoryId]] = field(default_factory=dict)
    pulls: list[InstanceId] = field(default_factory=list)
    routes: list[tuple[TrajectoryId, InstanceId, int]] = field(default_factory=list)
    """Trajectory, instance, and the version that the instance will have."""


class CoordinatorCycle:
    """The state of one cycle. It reads the server and the buffers and changes neither.

    Every command is answered when a snapshot is accepted, so what an instance holds is routed.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        model: CostModel,
        server: TrajectoryServer,
        buffers: Buffers,
        snapshots: Iterable[InstanceSnapshot],
        kv_budgets: Mapping[InstanceId, float],
    ) -> None:
        self._settings = settings
        self._model = replace(model, growth_tokens=server.lengths.growth)
        self._server = server
        self._entries = buffers
        # One that is starting again has no throughput, and would attract the work of all others.
        serving = (snapshot for snapshot in snapshots if snapshot.serves)
        self._snapshots = sorted(serving, key=lambda each: each.instance)
        self._loads = [
            InstanceLoad(
                index=index,
                instance=each.instance,
                version=each.version,
                kv_budget=kv_budgets[each.instance],
                kv_cache=each.kv_cache,
                running=len(each.running),
                waiting=len(each.waiting),
            )
            for index, each in enumerate(self._snapshots)
        ]
        is_length_aware = bool(self._loads) and settings.routing == "length-aware"
        self._sides = sides(self._loads, server) if is_length_aware else None
        self._initial = longest_first(server) if is_length_aware else server.initial.values()
        self._work: dict[int, tuple[list[RoutingCandidate], list[RoutingCandidate]]] = {}
        self._assigned = [
            RoutingCandidate(each.id, each.group, each.version, each.length)
            for each in server.returned.values()
        ]

    def decide(self, newest: int) -> CycleDecision:
        """Synchronisation, migration and routing; `newest` is the parameter server's version."""
        decision = CycleDecision()
        if not self._loads:
            return decision
        settings, model, entries = self._settings, self._model, self._entries
        loads = [load.copy() for load in self._loads]
        queue = self._queue()
        common = (settings, model, loads, entries.copy())
        for found in to_synchronise(*common, queue, newest, self._sides):
            load = self._loads[found.index]
            running, waiting = self._held(load)
            # Also what has completed since the snapshot leaves the load.
            self._remove(load, running + waiting, decision)
            load.kv_cache, load.running, load.waiting, load.version = 0.0, 0, 0, newest
            self._work[load.index] = ([], [])
            decision.pulls.append(load.instance)
        if decision.interrupts:
            queue = self._queue()
        common = (settings, model, self._loads, entries)
        for load, moved in to_migrate(*common, queue, self._held, self._left, self._sides):
            running, waiting = self._held(load)
            gone = {move.trajectory for move in moved}
            kept = [trajectory for trajectory in running if trajectory.trajectory not in gone]
            load.waiting -= sum(trajectory.trajectory in gone for trajectory in waiting)
            load.running -= len(running) - len(kept)
            removed_tokens = sum(c.length for c in running) - sum(c.length for c in kept)
            load.kv_cache = max(0.0, load.kv_cache - model.k5 * removed_tokens)
            self._remove(load, moved, decision)
        reserved = entries.copy()
        router = make_router(settings, model, self._loads, reserved, self._sides)
        for candidate, load in route(router, reserved, self._queue()):
            decision.routes.append((candidate.trajectory, load.instance, load.version))
        return decision

    def _queue(self) -> Queue:
        place = self._entries.place
        return Queue(self._assigned, self._initial, lambda g: place(g) is not None)

    def _remove(
        self, load: InstanceLoad, moved: list[RoutingCandidate], decision: CycleDecision
    ) -> None:
        if moved:
            decision.interrupts.setdefault(load.instance, []).extend(c.trajectory for c in moved)
            self._assigned += moved

    def _held(self, load: InstanceLoad) -> tuple[list[RoutingCandidate], list[RoutingCandidate]]:
        """Running and waiting trajectories of an instance that have not ended since."""
        if load.index not in self._work:
            shown = self._snapshots[load.index]
            running = self._candidates(shown, shown.running, shown.running_tokens)
            waiting = self._candidates(shown, shown.waiting, shown.waiting_tokens)
            seen = {*shown.running, *shown.waiting}
            # The parts of a snapshot that several machines assemble are not of one moment.
            running += [
                RoutingCandidate(each.id, each.group, each.version, each.length)
                for each in self._server.on_instance(shown.instance)
                if each.id not in seen
            ]
            self._work[load.index] = (running, waiting)
        return self._work[load.index]

    def _left(self, held: Iterable[RoutingCandidate]) -> float:
        """Tokens that trajectories of instances are expected to draw still, in all."""
        prompts = ((each.length, self._server.get(each.trajectory)) for each in held)
        drawn = (length - record.prompt_tokens for length, record in prompts if record is not None)
        return self._server.lengths.tokens_left(drawn)

    def _candidates(
        self, shown: InstanceSnapshot, ids: tuple[TrajectoryId, ...], lengths: tuple[int, ...]
    ) -> list[RoutingCandidate]:
        found = []
        for trajectory, length in zip(ids, lengths, strict=True):
            record = self._server.get(trajectory)
            if record is not None and record.instance == shown.instance:
                found.append(RoutingCandidate(trajectory, record.group, record.version, length))
        return found
