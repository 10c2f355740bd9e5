"""Upper bounds on what fits for deployments of one size: free GPUs, and groups with capacity.

A bound may say yes to what does not fit, and never no to what fits: on "no" every search would
fail.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.waiting.units import Size, Sizes
from plexrl.scheduler.rules.limits import TOTAL_MAX

NO_FIT = -1
"""A number of bytes that is too small for every deployment."""

_ROUNDING = 1e-12
"""More than the rounding error of a difference of loads."""


@dataclass(slots=True, kw_only=True, eq=False)
class GroupBound:
    """The groups of one size that accept members."""

    loads: NDArray[np.float64]
    """Loads of the groups, ascending."""
    states: NDArray[np.int64]
    """The largest state that fits a group with this load or less, ascending."""
    load_max: float

    def may_join(self, duties: NDArray[np.float64], states: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether deployments of these duties and states may fit a group: [deployments] bool."""
        # The same bound as in `placement.can_take`, a little wider.
        at = self.loads.searchsorted(self.load_max - duties + _ROUNDING, side="right")
        return (at > 0) & (self.states[at - 1] >= states)


class FitBounds:
    """The bounds of one pass, kept until a deployment is placed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._policy_shares = cluster.settings.anybody_shares
        self._free: dict[Size, int] = {}
        self._groups: dict[Size, GroupBound | None] = {}
        self._free_gpus: int | None = None
        self._refused: dict[Size, int] = {}
        """The smallest state of each size for which a search for free GPUs failed. Free GPUs only
        get fewer in a pass."""

    def invalidate(self) -> None:
        """Drop the bounds, because a deployment was placed."""
        self._free_gpus = None
        self._free.clear()
        self._groups.clear()

    def note_refusal(self, size: Size, state_bytes: int) -> None:
        """A search for free GPUs failed for this size and state: it fails for larger states too."""
        self._refused[size] = min(state_bytes, self._refused.get(size, state_bytes))
        self._free.pop(size, None)

    def free_state_bytes(self, size: Size) -> int:
        """The largest state for which free GPUs suffice; `NO_FIT` if they suffice for none."""
        most = self._free.get(size)
        if most is None:
            most = NO_FIT
            for kind, gpus in self._cluster.inventory.pool.free_by_kind(size.node_type):
                if gpus >= size.workers:
                    on_gpus = TOTAL_MAX if kind.gpu_kind else kind.gpu_memory_bytes * size.workers
                    most = max(most, on_gpus)
            refused = self._refused.get(size)
            if refused is not None:
                most = max(NO_FIT, min(most, refused - 1))
            self._free[size] = most
        return most

    def groups(self, size: Size) -> GroupBound | None:
        """The groups that a deployment of this size may join; None: there are none."""
        if size not in self._groups:
            shares = size.shares and self._policy_shares
            self._groups[size] = self._bound_groups(size) if shares else None
        return self._groups[size]

    def gang_may_fit(self, sizes: Sizes, takes_free: tuple[bool, ...]) -> bool:
        """Whether a gang of these sizes may fit, whatever their duties and states; `takes_free`
        says which may take free GPUs."""
        if self._free_gpus is None:
            self._free_gpus = self._cluster.inventory.pool.free_gpus()
        free = self._free_gpus
        if free < sum([size.workers for size in sizes if not size.shares]):
            return False
        new: set[int] = set()
        """Sizes of new groups that other deployments of the gang may join."""
        # Deployments that may take free GPUs first, because they create the groups.
        for may_take, size in sorted(zip(takes_free, sizes, strict=True), reverse=True):
            is_sharing = size.shares and self._policy_shares
            if is_sharing and self._cluster.settings.divides_groups:
                # It may be on the GPUs of all or of some smaller ones, too, so it joins groups of
                # this many GPUs or more.
                smaller = [each.workers for each in sizes if each.shares]
                beside = sum([workers for workers in smaller if workers < size.workers])
                if beside and self.groups(size._replace(workers=max(1, size.workers - beside))):
                    continue
            if is_sharing and (size.workers in new or self.groups(size) is not None):
                continue
            if not may_take or self.free_state_bytes(size) == NO_FIT:
                return False
            free -= size.workers
            if free < 0:
                return False
            if is_sharing:
                new.add(size.workers)
        return True

    def _bound_groups(self, size: Size) -> GroupBound | None:
        config, index = self._cluster.settings.config, self._cluster.inventory.index
        loads, states = [], []
        larger = self._cluster.settings.divides_groups
        for shape in index.shapes(size.workers, size.node_type, or_larger=larger):
            table = index.table(shape)
            rows = (table.is_open & (table.members < config.residents_max)).nonzero()[0]
            if rows.size:
                loads.append(table.load[rows])
                # Of a host optimizer a part of the state is never on a real GPU.
                on_gpus = TOTAL_MAX if shape.gpu_kind else shape.gpu_memory_bytes * size.workers
                scaled = (table.state_bytes_free[rows] // shape.gpus + 1) * size.workers
                states.append(np.minimum(scaled, on_gpus))
        if larger:
            for of_unions, free_bytes in self._cluster.inventory.unions.capacity(size.workers):
                loads.append(of_unions)
                states.append(np.minimum(TOTAL_MAX, (free_bytes + 1) * size.workers))
        if not loads:
            return None
        load, state = np.concatenate(loads), np.concatenate(states)
        order = load.argsort(kind="stable")
        state = np.maximum.accumulate(state[order])
        return GroupBound(loads=load[order], states=state, load_max=config.load_bound)
