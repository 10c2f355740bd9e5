"""The best micro-shift by looking at every group and every shift, compiled by numba.

Larger groups count, too, of which the deployment would get a part, with the cost of a border, and
groups that another deployment spans. The rings of all are kept as prefix sums, outside of what is
timed, as the capacity index keeps its own. Shifts that cannot be better than the best so far are
not looked at.
"""

import math
from typing import TYPE_CHECKING

import numba
import numpy as np
from numpy.typing import NDArray

from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.choice.candidates import can_take
from plexrl.scheduler.placement.choice.search import BORDER_S
from plexrl.scheduler.state.demand.trace import CRITICAL_WEIGHT, project
from plexrl.scheduler.state.records import Deployment

if TYPE_CHECKING:
    from plexrl.ids import GroupId
    from plexrl.scheduler.placement.capacity.index import CapacityShape

Sums = NDArray[np.int32]
"""[groups, 2 * horizon + 1]: weight of the busy slots before each, over two turns of the ring."""


class Rings:
    """The groups of one cluster."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._horizon = capacity.settings.config.horizon_slots
        state = capacity.state
        places: list[tuple[GroupId, ...]] = [(name,) for name in state.groups]
        places += {
            each.placement.groups for each in state.deployments.values() if each.placement.spans
        }
        self._rows = {names: row for row, names in enumerate(places)}
        self._sums: Sums = np.zeros((len(places), 2 * self._horizon + 1), dtype=np.int32)
        for row, names in enumerate(places):
            ring = np.zeros(self._horizon, dtype=np.int64)
            for member in {each for name in names for each in state.groups[name].members}:
                footprint = capacity.inventory.footprint(capacity.state.deployment(member))
                for start, stop, weight in footprint.intervals().tolist():
                    np.add.at(ring, np.arange(start, stop) % self._horizon, weight)
            self._sums[row, 1:] = np.cumsum(np.concatenate([ring, ring]))

    def best_cost(self, deployment: Deployment, now: float) -> float:
        """The least cost of a strict fit; infinite if there is none. The job's period divides the
        horizon."""
        capacity, trace = self._capacity, deployment.demand.trace
        assert trace is not None
        config, index = capacity.settings.config, capacity.inventory.index
        footprint = project(trace, self._horizon, config.period_tolerance)
        segments = np.array([(at, at + length) for at, length, _ in footprint.segments])
        rows: list[int] = []
        setup_s: list[float] = []
        larger = capacity.settings.divides_groups
        for shape in index.shapes(
            deployment.spec.workers, deployment.spec.node_type, or_larger=larger
        ):
            table = index.table(shape)
            takes = can_take(capacity.settings, table, deployment, trace.duty)
            found = [table.groups[row] for row in np.flatnonzero(takes)]
            rows += [self._rows[(name,)] for name in found if name is not None]
            setup_s += [BORDER_S if shape.gpus > deployment.spec.workers else 0.0] * len(found)
        unions = self._unions(deployment, trace.duty)
        rows += unions
        setup_s += [0.0] * len(unions)
        return float(
            _best_cost(
                self._sums,
                np.array(rows, dtype=np.int64),
                np.array(setup_s),
                segments,
                footprint.cycles,
                int(now) % self._horizon,
                math.ceil(trace.jitter_s),
                config.interference_weight / (footprint.cycles * CRITICAL_WEIGHT),
            )
        )

    def _unions(self, deployment: Deployment, duty: float) -> list[int]:
        """The rows of several groups that have as many GPUs as the deployment needs together, each
        with capacity for it."""
        capacity, found = self._capacity, list[int]()
        masks: dict[CapacityShape, NDArray[np.bool_]] = {}
        for names, row in self._rows.items():
            slots = [capacity.inventory.index.slots(name) for name in names]
            if len(slots) < 2 or sum(each.shape.gpus for each in slots) != deployment.spec.workers:
                continue
            for each in slots:
                if each.shape not in masks:
                    takes = can_take(capacity.settings, each.table, deployment, duty)
                    masks[each.shape] = takes
            if all(masks[each.shape][each.row] for each in slots):
                found.append(row)
        return found


@numba.njit  # type: ignore[untyped-decorator]  # numba has no types
def _best_cost(
    sums: Sums,
    rows: NDArray[np.int64],
    setup_s: NDArray[np.float64],
    segments: NDArray[np.float64],
    cycles: int,
    start: int,
    margin: int,
    weight: float,
) -> float:
    horizon = (sums.shape[1] - 1) // 2
    period = horizon // cycles
    best = np.inf
    for candidate in range(len(rows)):
        ring = sums[rows[candidate]]
        setup = setup_s[candidate]
        for shift in range(period):
            if best == 0.0:
                return 0.0
            overlap, near = 0, 0
            for cycle in range(cycles):
                base = start + shift + cycle * period
                for segment in range(len(segments)):
                    low = math.floor(base + segments[segment, 0])
                    high = math.ceil(base + segments[segment, 1])
                    at = low % horizon
                    overlap += ring[at + high - low] - ring[at]
                    at = (low - margin) % horizon
                    near += ring[at + high - low + 2 * margin] - ring[at]
                if overlap or weight * near + setup >= best:
                    break
            cost = weight * near + setup
            if overlap == 0 and cost < best:
                best = cost
    return best
