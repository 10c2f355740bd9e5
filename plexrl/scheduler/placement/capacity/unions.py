"""Unions: groups that a deployment spans, and that another of the same size can join together.

A search asks for the least loaded unions of one size that can take a deployment. There may be
thousands of them, so unions whose groups have the same shapes stand in one table, whose rows name
the groups' rows in the tables of their shapes: a few array operations answer for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plexrl.ids import DeploymentId, GroupId
from plexrl.scheduler.placement.capacity.index import CapacityShape, GroupSlots, ShapeTable

Names = tuple[GroupId, ...]
Shapes = tuple[CapacityShape, ...]


@dataclass(slots=True)
class _Table:
    """The unions of groups of these shapes, in no order that matters."""

    tables: tuple[ShapeTable, ...]
    """The table of each group's shape."""
    rows: NDArray[np.intp]
    """[unions or more, groups]: each group's row there."""
    names: list[Names] = field(default_factory=list)


class Unions:
    """The unions of a cluster: of each deployment that spans several groups, the groups without a
    rollout, if they are at least two."""

    def __init__(self) -> None:
        self._of: dict[DeploymentId, Names] = {}
        self._members: dict[Names, dict[DeploymentId, None]] = {}
        self._at: dict[Names, tuple[Shapes, int]] = {}
        self._tables: dict[Shapes, _Table] = {}

    def enter(self, deployment: DeploymentId, groups: Sequence[GroupSlots]) -> None:
        """Set the groups of a deployment's union; fewer than two: it has none."""
        self.leave(deployment)
        if len(groups) < 2:
            return
        names = tuple([group.group for group in groups])
        self._of[deployment] = names
        members = self._members.setdefault(names, {})
        members[deployment] = None
        if len(members) > 1:
            return
        shapes = tuple([group.shape for group in groups])
        table = self._tables.get(shapes)
        if table is None:
            table = self._tables[shapes] = _Table(
                tuple([group.table for group in groups]), np.zeros((4, len(groups)), np.intp)
            )
        at = len(table.names)
        if at == len(table.rows):
            table.rows = np.concatenate([table.rows, np.zeros_like(table.rows)])
        table.rows[at] = [group.row for group in groups]
        table.names.append(names)
        self._at[names] = shapes, at

    def leave(self, deployment: DeploymentId) -> None:
        """Forget the union of a deployment, if it has one."""
        names = self._of.pop(deployment, None)
        if names is None:
            return
        members = self._members[names]
        del members[deployment]
        if members:
            return
        del self._members[names]
        shapes, at = self._at.pop(names)
        table = self._tables[shapes]
        # The last union takes the free row.
        last = table.names.pop()
        if at < len(table.names):
            table.names[at] = last
            table.rows[at] = table.rows[len(table.names)]
            self._at[last] = shapes, at
        if not table.names:
            del self._tables[shapes]

    def least_loaded(
        self, gpus: int, can_take: Callable[[CapacityShape], NDArray[np.bool_] | None], count: int
    ) -> list[Names]:
        """At most `count` unions that have so many GPUs and whose groups can all take a deployment,
        the least loaded first; among equals those whose first group is the oldest.

        `can_take`: the rows of a shape's table that can; None: the shape does not suit.
        """
        found: list[tuple[float, int, Names]] = []
        masks: dict[CapacityShape, NDArray[np.bool_] | None] = {}
        for shapes, table in self._tables.items():
            if sum([shape.gpus for shape in shapes]) != gpus:
                continue
            for shape in shapes:
                if shape not in masks:
                    masks[shape] = can_take(shape)
            rows = table.rows[: len(table.names)]
            takes, load = np.ones(len(rows), bool), np.zeros(len(rows))
            for column, (shape, of_shape) in enumerate(zip(shapes, table.tables, strict=True)):
                mask = masks[shape]
                if mask is None:
                    takes[:] = False
                    break
                takes &= mask[rows[:, column]]
                np.maximum(load, of_shape.load[rows[:, column]], out=load)
            at = takes.nonzero()[0]
            if at.size > count:
                # Equals of the last one stay: the group's number decides among them.
                at = at[load[at] <= np.partition(load[at], count - 1)[count - 1]]
            serial = table.tables[0].serial[rows[at, 0]]
            for row, loaded, number in zip(
                at.tolist(), load[at].tolist(), serial.tolist(), strict=True
            ):
                found.append((loaded, number, table.names[row]))
        found.sort()
        return [names for _, _, names in found[:count]]

    def capacity(self, gpus: int) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """(load, bytes of one more member's state for each GPU) of the unions with at least so many
        GPUs, by the fullest of the groups of each; in several parts."""
        found = []
        for shapes, table in self._tables.items():
            if sum([shape.gpus for shape in shapes]) >= gpus:
                rows = table.rows[: len(table.names)].T
                loads = [each.load[at] for each, at in zip(table.tables, rows, strict=True)]
                free = [
                    each.state_bytes_free[at] // each.gpus
                    for each, at in zip(table.tables, rows, strict=True)
                ]
                found.append((np.max(loads, axis=0), np.min(free, axis=0)))
        return found

    def check_equal(self, other: "Unions") -> None:
        """Assert that both have the same unions."""
        assert self._of == other._of, f"the unions are {self._of}, not {other._of}"
        for names, (shapes, at) in self._at.items():
            assert self._tables[shapes].names[at] == names, f"{names} has another row"
