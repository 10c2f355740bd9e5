"""Upper bounds on what fits for deployments of one size: free GPUs, and groups with capacity.

A bound may say yes to what does not fit, and never no to what fits: on "no" every search would
fail.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plexrl.scheduler.placement.capacity.capacity import Capacity
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


def free_gpus_needed(size: Size, sizes: Iterable[Size], *, divides: bool) -> int:
    """The least number of free GPUs for a deployment of a gang of these sizes that joins no group
    of others: it may be on the GPUs of smaller ones of the gang, and then needs the rest."""
    if not (divides and size.shares):
        return size.workers
    smaller = [each.workers for each in sizes if each.shares and each.workers < size.workers]
    return max(1, size.workers - sum(smaller))


def _by_workers(each: tuple[bool, Size]) -> tuple[int, bool]:
    """Sorts by size; of one size, deployments that may take free GPUs come first."""
    return each[1].workers, not each[0]


class FitBounds:
    """The bounds of one pass, kept until a deployment is placed."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._policy_shares = capacity.settings.anybody_shares
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
            for kind, gpus in self._capacity.inventory.pool.free_by_kind(size.node_type):
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
            self._free_gpus = self._capacity.inventory.pool.free_gpus()
        free = self._free_gpus
        alone, sharing = list[tuple[bool, Size]](), list[tuple[bool, Size]]()
        for may_take, size in sorted(zip(takes_free, sizes, strict=True), key=_by_workers):
            (sharing if size.shares and self._policy_shares else alone).append((may_take, size))
        for may_take, size in alone:
            free -= size.workers
            if free < 0 or not may_take or self.free_state_bytes(size) == NO_FIT:
                return False
        for at, (may_take, size) in enumerate(sharing):
            if at and sharing[at - 1][1].workers == size.workers:
                # It may join that one.
                continue
            rest = free_gpus_needed(size, sizes, divides=self._capacity.settings.divides_groups)
            part = size._replace(workers=rest)
            if self.groups(size) or (rest < size.workers and self.groups(part)):
                continue
            free -= rest
            if free < 0:
                return False
            is_free = may_take and self.free_state_bytes(part) != NO_FIT
            if not is_free and not self._has_host(size, sharing):
                return False
        return True

    def _has_host(self, size: Size, sharing: Sequence[tuple[bool, Size]]) -> bool:
        """Whether another deployment of the gang that may take free GPUs may have this one on
        them."""
        divides = self._capacity.settings.divides_groups
        return any(
            may_take
            and each != size
            and (each.workers == size.workers or (divides and each.workers > size.workers))
            for may_take, each in sharing
        )

    def _bound_groups(self, size: Size) -> GroupBound | None:
        config, index = self._capacity.settings.config, self._capacity.inventory.index
        loads, states = [], []
        larger = self._capacity.settings.divides_groups
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
            for of_unions, free_bytes in self._capacity.inventory.unions.capacity(size.workers):
                loads.append(of_unions)
                states.append(np.minimum(TOTAL_MAX, (free_bytes + 1) * size.workers))
        if not loads:
            return None
        load, state = np.concatenate(loads), np.concatenate(states)
        order = load.argsort(kind="stable")
        state = np.maximum.accumulate(state[order])
        return GroupBound(loads=load[order], states=state, load_max=config.load_bound)
