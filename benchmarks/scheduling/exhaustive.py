"""The best micro-shift by looking at every group and every shift, compiled by numba.

Larger groups count, too, of which the deployment would get a part, with the cost of a border.
Unions of groups that another deployment spans do not. The rings of
all groups are kept as prefix sums, outside of what is timed, as the capacity index keeps its own.
Shifts that cannot be better than the best so far are not looked at.
"""

import math

import numba
import numpy as np
from numpy.typing import NDArray

from plexrl.scheduler.placement.choice.candidates import can_take
from plexrl.scheduler.placement.choice.search import BORDER_S
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.state.demand.trace import CRITICAL_WEIGHT, project
from plexrl.scheduler.state.records import Deployment

Sums = NDArray[np.int64]
"""[groups, 2 * horizon + 1]: weight of the busy slots before each, over two turns of the ring."""


class Rings:
    """The groups of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._horizon = cluster.settings.config.horizon_slots
        self._rows: dict[str, int] = {}
        groups = cluster.state.groups.values()
        self._sums: Sums = np.zeros((len(groups), 2 * self._horizon + 1), dtype=np.int64)
        for row, group in enumerate(groups):
            self._rows[group.group] = row
            ring = np.zeros(self._horizon, dtype=np.int64)
            for member in group.members:
                footprint = cluster.inventory.footprint(cluster.state.deployment(member))
                for start, stop, weight in footprint.intervals().tolist():
                    np.add.at(ring, np.arange(start, stop) % self._horizon, weight)
            self._sums[row, 1:] = np.cumsum(np.concatenate([ring, ring]))

    def best_cost(self, deployment: Deployment, now: float) -> float:
        """The least cost of a strict fit; infinite if there is none. The job's period divides the
        horizon."""
        cluster, trace = self._cluster, deployment.trace
        assert trace is not None
        config, index = cluster.settings.config, cluster.inventory.index
        footprint = project(trace, self._horizon, config.period_tolerance)
        segments = np.array([(at, at + length) for at, length, _ in footprint.segments])
        rows: list[int] = []
        setup_s: list[float] = []
        larger = cluster.settings.divides_groups
        for shape in index.shapes(deployment.workers, deployment.node_type, or_larger=larger):
            table = index.table(shape)
            takes = can_take(cluster.settings, table, deployment, trace.duty)
            found = [self._rows[table.groups[row] or ""] for row in np.flatnonzero(takes)]
            rows += found
            setup_s += [BORDER_S if shape.gpus > deployment.workers else 0.0] * len(found)
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
