"""For whom there cannot be room: a look at the groups of one size, before any is searched."""

import numpy as np

from plexrl.scheduler.admission.fit.bound import NOTHING, FitBound
from plexrl.scheduler.admission.queues.waiting import Size, Sizes
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.placement.policies import PlacementMode


class FitBoundCache:
    """Of each size, looked up once and kept until somebody is placed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        kept_apart = context.policy.modes(has_profile=True, is_patience_over=True, is_scarce=False)
        self.anybody_shares = kept_apart != (PlacementMode.DEDICATED,)
        """By the policy: a new group has room for others."""
        self._known: dict[tuple[Size, bool, bool], FitBound] = {}
        self._gangs: dict[tuple[Sizes, tuple[bool, ...]], FitBound] = {}
        self._free: int | None = None
        """GPUs in no group."""
        self._refused: dict[Size, int] = {}
        """The smallest state for which no free GPUs were found where there seemed to be some. What
        is free becomes less only."""

    def forget(self) -> None:
        """Somebody was placed."""
        self._free = None
        self._known.clear()
        self._gangs.clear()

    def refused(self, size: Size, state_bytes: int) -> None:
        """No free GPUs were found for a deployment of that size, and there are none for larger
        ones."""
        least = self._refused.get(size)
        self._refused[size] = state_bytes if least is None else min(least, state_bytes)
        self.forget()

    def of(self, size: Size, *, takes_free: bool = True, joins: bool = True) -> FitBound:
        """What there is for deployments of a size: among free GPUs if they may take them, and in
        groups if they may join any."""
        key = size, takes_free, joins
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look(size, takes_free, joins)
        return found

    def of_all(self, sizes: Sizes) -> FitBound:
        """What there is for units of these sizes, if nobody is ahead of them."""
        return self.of(sizes[0]) if len(sizes) == 1 else self.of_gang(sizes, (True,) * len(sizes))

    def of_gang(self, sizes: Sizes, takes_free: tuple[bool, ...]) -> FitBound:
        """What there is for gangs of these sizes; `takes_free` says which of them may take free
        GPUs. Duties and states are not looked at, so units of a gang count as asking for none."""
        key = sizes, takes_free
        found = self._gangs.get(key)
        if found is None:
            free_state_bytes = 0 if self._may_hold(sizes, takes_free) else NOTHING
            found = self._gangs[key] = FitBound(free_state_bytes=free_state_bytes)
        return found

    def _may_hold(self, sizes: Sizes, takes_free: tuple[bool, ...]) -> bool:
        if self._free is None:
            self._free = self._context.inventory.pool.free_gpus()
        free = self._free
        if free < sum([size.workers for size in sizes if not size.shares]):
            return False
        new: set[int] = set()
        """GPUs of the gang's own groups that others of it may join."""
        # Those that may take free GPUs first, for they make the groups.
        for may_take, size in sorted(zip(takes_free, sizes, strict=True), reverse=True):
            is_sharing = size.shares and self.anybody_shares
            if is_sharing and (size.workers in new or self._is_any_group_open(size)):
                continue
            if not may_take or self.of(size, joins=False).is_nothing:
                return False
            free -= size.workers
            if free < 0:
                return False
            if is_sharing:
                new.add(size.workers)
        return True

    def _is_any_group_open(self, size: Size) -> bool:
        return not self.of(size, takes_free=False).is_nothing

    def _look(self, size: Size, takes_free: bool, joins: bool) -> FitBound:
        free_state_bytes = self._free_state_bytes(size) if takes_free else NOTHING
        if not (joins and size.shares and self.anybody_shares):
            return FitBound(free_state_bytes=free_state_bytes)
        config, index = self._context.config, self._context.inventory.index
        loads, states = [], []
        for shape in index.shapes(size.workers, size.node_type):
            table = index.table(shape)
            rows = (table.is_open & (table.members < config.residents_max)).nonzero()[0]
            if rows.size:
                loads.append(table.load[rows])
                on_gpus = shape.gpu_memory_bytes * shape.gpus
                states.append(np.minimum(table.state_bytes_free[rows], on_gpus))
        if not loads:
            return FitBound(free_state_bytes=free_state_bytes)
        load = loads[0] if len(loads) == 1 else np.concatenate(loads)
        state = states[0] if len(states) == 1 else np.concatenate(states)
        order = load.argsort(kind="stable")
        load, state = load[order], np.maximum.accumulate(state[order])
        # Of those that have room for no more than a less loaded one, nothing needs to be known.
        steps = [0, *(np.flatnonzero(state[1:] > state[:-1]) + 1).tolist()]
        return FitBound(
            free_state_bytes=free_state_bytes,
            loads=load[steps].tolist(),
            states=state[steps].tolist(),
            load_max=config.load_bound,
        )

    def _free_state_bytes(self, size: Size) -> int:
        most = NOTHING
        for kind, gpus in self._context.inventory.pool.free_by_kind(size.node_type):
            if gpus >= size.workers:
                most = max(most, kind.gpu_memory_bytes * size.workers)
        refused = self._refused.get(size)
        return most if refused is None else max(NOTHING, min(most, refused - 1))
