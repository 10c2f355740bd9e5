"""For whom there cannot be room: a look at the groups of one size, before any is searched.

The answer errs on one side only. Where it is no, every search would end without a place; where it
is yes, one may.
"""

import itertools
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from plexrl.scheduler.context import Context
from plexrl.scheduler.placement import ways
from plexrl.scheduler.policies import Way
from plexrl.scheduler.state import Deployment
from plexrl.scheduler.waiting import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What there is for deployments of one size."""

    is_free: bool
    """As many GPUs are free."""
    loads: tuple[float, ...]
    """Of the groups that take members, ascending."""
    state_bytes: tuple[int, ...]
    """The largest state that one of the groups up to this load has room for."""


class Rooms:
    """Of each size, looked up once and kept until it is said to have changed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[Size, _Room] = {}

    def forget(self) -> None:
        """Somebody was placed."""
        self._known.clear()

    def is_free(self, deployment: Deployment) -> bool:
        """Whether as many GPUs as it asks for are in no group."""
        most = self._context.inventory.pool.most_free_gpus(deployment.node_type)
        return most >= deployment.workers

    def any_for(self, size: Size) -> bool:
        """Whether there may be room for one of that size."""
        room = self._room(size)
        return room.is_free or bool(room.loads)

    def may_hold(self, deployment: Deployment, size: Size, now: float) -> bool:
        """Whether there may be room for a deployment of that size."""
        context, room = self._context, self._room(size)
        if room.is_free:
            return True
        if not room.loads or ways(context, deployment, now) == (Way.DEDICATED,):
            return False
        trace = deployment.trace
        duty = context.inventory.duty(deployment) if trace is None else trace.duty
        # Compared as `placement.has_room` does it.
        at = bisect_right(room.loads, context.config.load_max, key=lambda load: load + duty)
        return at > 0 and room.state_bytes[at - 1] >= deployment.state_bytes

    def _room(self, size: Size) -> _Room:
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = self._look(size)
        return found

    def _look(self, size: Size) -> _Room:
        context = self._context
        index = context.inventory.index
        is_free = context.inventory.pool.most_free_gpus(size.node_type) >= size.workers
        groups: list[tuple[float, int]] = []
        if size.shares and not is_free:
            for shape in index.shapes(size.workers, size.node_type):
                table = index.table(shape)
                takes = table.is_open & (table.members < context.config.residents_max)
                rows = np.flatnonzero(takes)
                loads, states = table.load[rows].tolist(), table.state_bytes_free[rows].tolist()
                groups += zip(loads, states, strict=True)
        groups.sort()
        return _Room(
            is_free=is_free,
            loads=tuple(load for load, _ in groups),
            state_bytes=tuple(itertools.accumulate((each for _, each in groups), max)),
        )
