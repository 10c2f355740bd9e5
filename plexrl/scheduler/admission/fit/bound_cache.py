"""Computes fit bounds from the groups of one size, before any group is searched."""

import numpy as np

from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.waiting.bound import NO_FIT, FitBound
from plexrl.scheduler.placement.waiting.waiting import Size, Sizes
from plexrl.scheduler.rules.limits import TOTAL_MAX


class FitBoundCache:
    """The fit bound of each size, kept until a deployment is placed."""

    def __init__(self, cluster: Cluster, refused: dict[Size, int]) -> None:
        """`refused`: the smallest state of each size for which a search for free GPUs failed in
        this pass. Free GPUs only get fewer. The cache adds to it."""
        self._cluster = cluster
        self.policy_shares = cluster.settings.anybody_shares
        self._bounds: dict[tuple[Size, bool, bool], FitBound] = {}
        self._gang_bounds: dict[tuple[Sizes, tuple[bool, ...]], FitBound] = {}
        self._free_gpus: int | None = None
        self._refused = refused

    def invalidate(self) -> None:
        """Drop the bounds, because a deployment was placed."""
        self._free_gpus = None
        self._bounds.clear()
        self._gang_bounds.clear()

    def note_refusal(self, size: Size, state_bytes: int) -> None:
        """A search for free GPUs failed for this size and state: it fails for larger states too."""
        least = self._refused.get(size)
        self._refused[size] = state_bytes if least is None else min(least, state_bytes)
        self.invalidate()

    def of(self, size: Size, *, takes_free: bool = True, joins: bool = True) -> FitBound:
        """The bound for deployments of a size that may take free GPUs (`takes_free`) and join
        groups (`joins`)."""
        key = size, takes_free, joins
        found = self._bounds.get(key)
        if found is None:
            found = self._bounds[key] = self._compute(size, takes_free, joins)
        return found

    def of_unit(self, sizes: Sizes) -> FitBound:
        """The bound for units of these sizes that no other deployment blocks."""
        return self.of(sizes[0]) if len(sizes) == 1 else self.of_gang(sizes, (True,) * len(sizes))

    def of_gang(self, sizes: Sizes, takes_free: tuple[bool, ...]) -> FitBound:
        """The bound for gangs of these sizes; `takes_free` says which may take free GPUs. Ignores
        duties and states."""
        key = sizes, takes_free
        found = self._gang_bounds.get(key)
        if found is None:
            free_state_bytes = 0 if self._gang_may_fit(sizes, takes_free) else NO_FIT
            found = self._gang_bounds[key] = FitBound(free_state_bytes=free_state_bytes)
        return found

    def _gang_may_fit(self, sizes: Sizes, takes_free: tuple[bool, ...]) -> bool:
        if self._free_gpus is None:
            self._free_gpus = self._cluster.inventory.pool.free_gpus()
        free = self._free_gpus
        if free < sum([size.workers for size in sizes if not size.shares]):
            return False
        new: set[int] = set()
        """Sizes of new groups that other deployments of the gang may join."""
        # Deployments that may take free GPUs first, because they create the groups.
        for may_take, size in sorted(zip(takes_free, sizes, strict=True), reverse=True):
            is_sharing = size.shares and self.policy_shares
            if is_sharing and (size.workers in new or self._is_any_group_open(size)):
                continue
            if not may_take or self.of(size, joins=False).is_empty:
                return False
            free -= size.workers
            if free < 0:
                return False
            if is_sharing:
                new.add(size.workers)
        return True

    def _is_any_group_open(self, size: Size) -> bool:
        return not self.of(size, takes_free=False).is_empty

    def _compute(self, size: Size, takes_free: bool, joins: bool) -> FitBound:
        free_state_bytes = self._free_state_bytes(size) if takes_free else NO_FIT
        if not (joins and size.shares and self.policy_shares):
            return FitBound(free_state_bytes=free_state_bytes)
        config, index = self._cluster.settings.config, self._cluster.inventory.index
        loads, states = [], []
        for shape in index.shapes(size.workers, size.node_type):
            table = index.table(shape)
            rows = (table.is_open & (table.members < config.residents_max)).nonzero()[0]
            if rows.size:
                loads.append(table.load[rows])
                # Of a host optimizer a part of the state is never on a real GPU.
                on_gpus = TOTAL_MAX if shape.gpu_kind else shape.gpu_memory_bytes * shape.gpus
                states.append(np.minimum(table.state_bytes_free[rows], on_gpus))
        if not loads:
            return FitBound(free_state_bytes=free_state_bytes)
        load = loads[0] if len(loads) == 1 else np.concatenate(loads)
        state = states[0] if len(states) == 1 else np.concatenate(states)
        order = load.argsort(kind="stable")
        load, state = load[order], np.maximum.accumulate(state[order])
        # Drop groups that fit no larger state than a less loaded group.
        steps = [0, *(np.flatnonzero(state[1:] > state[:-1]) + 1).tolist()]
        return FitBound(
            free_state_bytes=free_state_bytes,
            loads=load[steps].tolist(),
            states=state[steps].tolist(),
            load_max=config.load_bound,
        )

    def _free_state_bytes(self, size: Size) -> int:
        most = NO_FIT
        for kind, gpus in self._cluster.inventory.pool.free_by_kind(size.node_type):
            if gpus >= size.workers:
                on_gpus = TOTAL_MAX if kind.gpu_kind else kind.gpu_memory_bytes * size.workers
                most = max(most, on_gpus)
        refused = self._refused.get(size)
        return most if refused is None else max(NO_FIT, min(most, refused - 1))
