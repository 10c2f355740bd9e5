"""Every candidate and every shift for a deployment, looked at slot by slot.

It reads the state's records only: nodes, groups, members and their reservations. It shares no code
with the search. Periods divide the ring; otherwise the search leaves a margin of two slots.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.records import Deployment, Group, State

CRITICAL, SLACK = 4, 1
"""Weight of a busy slot by whether its segment must not be delayed."""

BORDER_S = 1.0
SPILL_BYTES_PER_S = 1e9
GROUPS_MAX = 8
"""Most groups of a deployment."""

Ring = dict[int, int]
"""Weight of each busy slot."""


class Placement(NamedTuple):
    """A candidate, its best shift, and what it costs."""

    cost: float
    groups: tuple[str, ...]
    shift: int


class BruteForce:
    """The placements of one deployment, beside these groups for some of its ranks."""

    def __init__(
        self,
        state: State,
        config: SchedulerConfig,
        deployment: Deployment,
        beside: Sequence[Group] = (),
    ) -> None:
        assert deployment.demand.trace is not None
        self._state, self._config, self._deployment = state, config, deployment
        self._trace: DemandTrace = deployment.demand.trace
        self._beside = [group.group for group in beside]
        self._gpus = deployment.spec.workers - sum(len(group.gpus) for group in beside)

    def strict(self, now: float) -> list[Placement]:
        """The best strict placement on each candidate that has one."""
        found = []
        for groups in self._candidates():
            ring = self._ring(groups)
            shifts = self._costs(ring, int(now) % self._config.horizon_slots)
            if shifts:
                cost, shift = min(shifts)
                more = self._setup_s(groups)
                found.append(Placement(cost + more, tuple(each.group for each in groups), shift))
        return sorted(found)

    def _candidates(self) -> Iterator[list[Group]]:
        state = self._state
        for group in state.groups.values():
            larger = len(group.gpus) > self._gpus
            is_whole = len(group.gpus) == self._gpus
            if (is_whole or (larger and self._is_divisible(group))) and self._takes(group):
                yield [group]
        seen = set()
        for other in state.deployments.values():
            groups = [state.groups[name] for name in other.placement.groups]
            groups = [each for each in groups if not self._has_rollout(each)]
            names = tuple(each.group for each in groups)
            gpus = sum(len(each.gpus) for each in groups)
            if len(groups) > 1 and gpus == self._gpus and names not in seen:
                seen.add(names)
                if all(self._takes(each) for each in groups):
                    yield groups

    def _is_divisible(self, group: Group) -> bool:
        members = [self._state.deployments[name] for name in group.members]
        return not group.fillers and all(
            len(each.placement.groups) < GROUPS_MAX for each in members
        )

    def _has_rollout(self, group: Group) -> bool:
        return any(self._state.deployments[name].spec.kind == "rollout" for name in group.members)

    def _takes(self, group: Group) -> bool:
        state, own = self._state, self._deployment
        members = [state.deployments[name] for name in group.members]
        if not members or not group.shared or group.is_closed or group.group in self._beside:
            return False
        if own.spec.kind == "rollout" and any(
            m.job == own.job and m.spec.kind == "rollout" for m in members
        ):
            return False
        load = 0.0
        for each in members:
            if each.placement.reservation is None or each.placement.reservation.trace is None:
                return False
            load += each.placement.reservation.trace.duty
        return (
            len(members) < self._config.residents_max
            and load + self._trace.duty <= self._config.load_max + 1e-9
            and self._spare(group, with_nvme=True) >= own.spec.state_bytes * len(group.gpus)
        )

    def _spare(self, group: Group, *, with_nvme: bool) -> int:
        """The largest state of one more member, times the deployment's workers, in bytes."""
        least = []
        for name in {gpu.node for gpu in group.gpus}:
            node = self._state.nodes[name]
            free = node.host_memory_bytes + (node.nvme_bytes if with_nvme else 0)
            for each in self._state.deployments.values():
                for of_member in map(self._state.groups.__getitem__, each.placement.groups):
                    ranks = sum(gpu.node == name for gpu in of_member.gpus)
                    free -= each.spec.state_bytes * ranks // each.spec.workers
            ranks = sum(gpu.node == name for gpu in group.gpus)
            least.append(free * len(group.gpus) // ranks)
        return min(least) * self._deployment.spec.workers

    def _setup_s(self, groups: Sequence[Group]) -> float:
        """Spill and borders of a candidate that is one group."""
        if len(groups) > 1:
            return 0.0
        (group,) = groups
        own, gpus = self._deployment, len(group.gpus)
        free = max(0, self._spare(group, with_nvme=False) // own.spec.workers)
        over = (own.spec.state_bytes * gpus // own.spec.workers - free) * own.spec.workers / gpus
        return max(0.0, over) / SPILL_BYTES_PER_S + (BORDER_S if gpus > self._gpus else 0.0)

    def _ring(self, groups: Sequence[Group]) -> Ring:
        ring: Ring = {}
        for name in {name for group in groups for name in group.members}:
            reservation = self._state.deployments[name].placement.reservation
            assert reservation is not None
            assert reservation.trace is not None
            for slots, weight in self._slots(reservation.trace, reservation.shift, 0):
                for slot in slots:
                    at = slot % self._config.horizon_slots
                    ring[at] = ring.get(at, 0) + weight
        return ring

    def _slots(self, trace: DemandTrace, shift: float, margin: int) -> Iterator[tuple[range, int]]:
        """The slots of each segment of each cycle, and their weight."""
        period = int(trace.period_s)
        for cycle in range(self._config.horizon_slots // period):
            for segment in trace.segments:
                begin = cycle * period + shift + segment.offset_s
                low = math.floor(begin) - margin
                high = math.ceil(begin + segment.duration_s) + margin
                weight = CRITICAL if segment.slack_s < segment.duration_s else SLACK
                yield range(low, min(high, low + period)), weight

    def _costs(self, ring: Ring, start: int) -> list[tuple[float, int]]:
        """(cost, shift) of each shift that is free."""
        horizon, period = self._config.horizon_slots, int(self._trace.period_s)
        cycles, found = horizon // period, []
        for shift in range(period):
            overlap, near = (
                sum(
                    ring.get(slot % horizon, 0)
                    for slots, _ in self._slots(self._trace, start + shift, margin)
                    for slot in slots
                )
                for margin in (0, math.ceil(self._trace.jitter_s))
            )
            if not overlap:
                weight = self._config.interference_weight / (cycles * CRITICAL)
                found.append((weight * near, shift))
        return found
