"""The capacity index: who is busy when, on which GPUs, at every scale (PlexRL §4.3.1, §5.2.1).

Three levels, each asked before the next one is looked at:

1. the global profile: free GPUs per slot of the ring, for each node type, under a segment tree;
2. the node groups of one size and type: load, host memory and members as flat arrays, so that
   those which cannot take a job are sorted out in one pass;
3. a group's free time: windows on the ring, folded to the job's period.

A reservation subtracts a footprint from all three over the whole ring, or from none. What is not
asked about is not worked out: plans follow their jobs at every few cycles, questions come with a
placement, so a group's part of the profile and its folds are made anew when they are looked at.
Everything here follows from the nodes, the groups and the residents' footprints alone, so a
scheduler that starts again builds it anew and decides as before.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plexrl.errors import CapacityError
from plexrl.ids import DeploymentId, GroupId
from plexrl.scheduler.capacity.free_intervals import FreeIntervals
from plexrl.scheduler.capacity.segment_tree import SegmentTree
from plexrl.scheduler.capacity.shift_search import Fit, FoldTable, ShiftSearch
from plexrl.scheduler.state.demand import Footprint, slots_of

FOLDS_MAX = 32
"""Fold tables kept, one for each number of cycles that jobs had lately."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What makes groups interchangeable for a job."""

    node_type: str
    gpu_memory_bytes: int
    """Per GPU."""
    gpus: int


@dataclass(slots=True)
class GroupSlots:
    """One group as the index knows it."""

    group: GroupId
    shape: Shape
    table: "ShapeTable"
    """That the group has a row in."""
    row: int
    footprints: dict[DeploymentId, Footprint] = field(default_factory=dict)
    intervals: dict[DeploymentId, NDArray[np.int64]] = field(default_factory=dict)
    """Of the footprints, on the ring; made when they are first asked for, as are `busy`."""
    busy: dict[DeploymentId, int] = field(default_factory=dict)
    """`Footprint.busy`."""
    duties: dict[DeploymentId, float] = field(default_factory=dict)
    profiled: int = 0
    """The slots in which the profile has the group busy, one bit each; what the footprints say once
    it has been settled."""
    free: FreeIntervals | None = None
    """Made when it is first asked for after a change."""

    def busy_of(self, deployment: DeploymentId) -> int:
        """The slots of a resident's footprint, one bit each."""
        found = self.busy.get(deployment)
        if found is None:
            found = self.busy[deployment] = self.footprints[deployment].busy()
        return found

    def busy_of_all(self) -> int:
        """The slots in which any resident is busy, one bit each."""
        found = 0
        for deployment in self.footprints:
            found |= self.busy_of(deployment)
        return found


class ShapeTable:
    """All groups of one shape, a row each; rows of groups that went are used again."""

    def __init__(self, shape: Shape, horizon_slots: int) -> None:
        self._shape = shape
        self._horizon_slots = horizon_slots
        self.groups: list[GroupId | None] = []
        self._slots: list[GroupSlots | None] = []
        self.versions = np.zeros(0, dtype=np.int64)
        self.serial = np.zeros(0, dtype=np.int64)
        """The group's number: breaks ties, because rows depend on what came before."""
        self.load = np.zeros(0)
        """Summed duty of the residents."""
        self.host_bytes_free = np.zeros(0, dtype=np.int64)
        """How large the state of one more member may be to lie in host memory."""
        self.state_bytes_free = np.zeros(0, dtype=np.int64)
        """The same with NVMe."""
        self.members = np.zeros(0, dtype=np.int64)
        self.is_open = np.zeros(0, dtype=bool)
        self._free_rows: list[int] = []
        self._changes = 0
        self._folds: OrderedDict[int, FoldTable] = OrderedDict()

    def add(self, group: GroupId, serial: int) -> GroupSlots:
        """A row for `group`."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.groups[row] = group
        slots = self._slots[row] = GroupSlots(group=group, shape=self._shape, table=self, row=row)
        self.serial[row] = serial
        self.changed(row)
        return slots

    def remove(self, row: int) -> None:
        """Give the row back."""
        self.groups[row] = self._slots[row] = None
        self.load[row] = 0.0
        self.members[row] = 0
        self.is_open[row] = False
        self.changed(row)
        self._free_rows.append(row)

    def changed(self, row: int) -> None:
        """The row's residents are others than before."""
        self._changes += 1
        self.versions[row] = self._changes

    def search(self, rows: NDArray[np.intp], wanted: ShiftSearch) -> list[Fit]:
        """The best shift in each of `rows` that has one."""
        cycles = wanted.footprint.cycles
        table = self._folds.get(cycles)
        if table is None:
            table = FoldTable(self._horizon_slots, cycles)
            self._folds[cycles] = table
            if len(self._folds) > FOLDS_MAX:
                self._folds.popitem(last=False)
        self._folds.move_to_end(cycles)
        table.refresh(rows, self.versions, self._intervals)
        return table.search(rows, wanted)

    def least_loaded(self) -> GroupId | None:
        """A group that takes members, of the least load; None where none does."""
        open_rows = np.flatnonzero(self.is_open)
        return self.groups[open_rows[self.load[open_rows].argmin()]] if open_rows.size else None

    def _intervals(self, row: int) -> list[NDArray[np.int64]]:
        """Of the residents' footprints."""
        slots = self._slots[row]
        if slots is None:
            return []
        known = slots.intervals
        for deployment, footprint in slots.footprints.items():
            if deployment not in known:
                known[deployment] = footprint.intervals()
        return list(known.values())

    def _grow(self) -> None:
        size = len(self.groups)
        more = max(16, size)
        self.groups += [None] * more
        self._slots += [None] * more
        for name in (
            "versions",
            "serial",
            "load",
            "host_bytes_free",
            "state_bytes_free",
            "members",
        ):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, dtype=column.dtype)]))
        self.is_open = np.concatenate([self.is_open, np.zeros(more, dtype=bool)])
        # The lowest row is taken first.
        self._free_rows = list(range(size + more - 1, size - 1, -1))


class CapacityIndex:
    """Free time of the whole cluster over the ring."""

    def __init__(self, horizon_slots: int) -> None:
        self.horizon_slots = horizon_slots
        self._profiles: dict[str, SegmentTree] = {}
        self._groups: dict[GroupId, GroupSlots] = {}
        self._tables: dict[Shape, ShapeTable] = {}
        self._unsettled: dict[GroupId, None] = {}
        """Groups whose footprints are others than the profile knows."""

    # The cluster

    def add_gpus(self, node_type: str, gpus: int) -> None:
        """GPUs joined (or, negative, left): free on the whole ring."""
        self._profile(node_type).add(0, self.horizon_slots, gpus)

    def profile(self, node_type: str) -> SegmentTree:
        """Free GPUs of a type per slot."""
        for group in self._unsettled:
            self._settle(self._groups[group])
        self._unsettled.clear()
        return self._profile(node_type)

    def _profile(self, node_type: str) -> SegmentTree:
        found = self._profiles.get(node_type)
        if found is None:
            found = self._profiles[node_type] = SegmentTree(self.horizon_slots)
        return found

    def add_group(self, group: GroupId, shape: Shape, serial: int) -> None:
        """A group was formed; its time is free until footprints are reserved, and it takes no
        members by search until `set_room`."""
        assert group not in self._groups, f"{group} is in the index already"
        self._groups[group] = self._table(shape).add(group, serial)

    def remove_group(self, group: GroupId) -> None:
        """A group without residents is gone."""
        slots = self._groups.pop(group)
        assert not slots.footprints, f"{group} goes with residents"
        self._unsettled.pop(group, None)
        self._settle(slots)
        slots.table.remove(slots.row)

    def set_room(
        self, group: GroupId, *, is_open: bool, host_bytes_free: int, state_bytes_free: int
    ) -> None:
        """Whether the group takes more members, and how large the next one's state may be."""
        slots = self._groups[group]
        table, row = slots.table, slots.row
        table.is_open[row] = is_open
        table.host_bytes_free[row] = host_bytes_free
        table.state_bytes_free[row] = state_bytes_free

    # Reservations

    def reserve(
        self,
        group: GroupId,
        deployment: DeploymentId,
        footprint: Footprint,
        duty: float,
        *,
        strict: bool,
    ) -> None:
        """Subtract a footprint from the group and the profile over the whole ring.

        Raises:
            CapacityError: `strict`, and a segment does not lie in a free window; nothing changed.
        """
        slots = self._groups[group]
        assert deployment not in slots.footprints, f"{deployment} has a reservation on {group}"
        if strict and not self.free_intervals(group).fits(footprint):
            raise CapacityError(
                f"group {group!r} is not free in all segments of {deployment!r}: choose another "
                "shift or group",
                group=group,
            )
        slots.footprints[deployment] = footprint
        slots.duties[deployment] = duty
        self._after_change(slots)

    def fill(
        self, group: GroupId, residents: Mapping[DeploymentId, tuple[Footprint, float]]
    ) -> None:
        """Reserve for all residents of an empty group at once: (footprint, duty) of each."""
        slots = self._groups[group]
        assert not slots.footprints, f"{group} is not empty"
        for deployment, (footprint, duty) in residents.items():
            slots.footprints[deployment] = footprint
            slots.duties[deployment] = duty
        self._after_change(slots)

    def release(self, group: GroupId, deployment: DeploymentId) -> None:
        """Give a footprint back; the index is then as it was before `reserve`."""
        slots = self._groups[group]
        del slots.footprints[deployment]
        del slots.duties[deployment]
        self._forget(slots, deployment)
        self._after_change(slots)

    def replace(
        self, group: GroupId, deployment: DeploymentId, footprint: Footprint, duty: float
    ) -> None:
        """Have another footprint in the place of a resident's, wherever it lies."""
        slots = self._groups[group]
        slots.footprints[deployment] = footprint
        self._forget(slots, deployment)
        if slots.duties[deployment] == duty:
            # As mostly: it runs at other times than it was thought to.
            self._after_shift(slots)
            return
        slots.duties[deployment] = duty
        self._after_change(slots)

    @staticmethod
    def _forget(slots: GroupSlots, deployment: DeploymentId) -> None:
        slots.intervals.pop(deployment, None)
        slots.busy.pop(deployment, None)

    def _settle(self, slots: GroupSlots) -> None:
        """Have the profile say of the group what its footprints say."""
        was, now = slots.profiled, slots.busy_of_all()
        slots.profiled = now
        if now == was:
            return
        profile = self._profile(slots.shape.node_type)
        given, taken = was & ~now, now & ~was
        for changed, gpus in ((given, slots.shape.gpus), (taken, -slots.shape.gpus)):
            if changed:
                slots_changed = slots_of(changed, self.horizon_slots)
                profile.add_pattern(slots_changed.astype(np.int32) * np.int32(gpus))

    def _after_change(self, slots: GroupSlots) -> None:
        table, row = slots.table, slots.row
        # Summed anew and exactly: the same members give the same number, whatever their history.
        table.load[row] = math.fsum(slots.duties.values())
        table.members[row] = len(slots.footprints)
        self._after_shift(slots)

    def _after_shift(self, slots: GroupSlots) -> None:
        slots.free = None
        self._unsettled[slots.group] = None
        slots.table.changed(slots.row)

    # Questions

    def footprint(self, group: GroupId, deployment: DeploymentId) -> Footprint:
        """What is reserved for a resident."""
        return self._groups[group].footprints[deployment]

    def slots(self, group: GroupId) -> GroupSlots:
        """All that is known of a group."""
        return self._groups[group]

    def free_intervals(self, group: GroupId) -> FreeIntervals:
        """The group's free windows."""
        slots = self._groups[group]
        if slots.free is None:
            slots.free = FreeIntervals(self.horizon_slots, slots.busy_of_all())
        return slots.free

    def row(self, group: GroupId, shape: Shape) -> int | None:
        """The group's row in the table of `shape`, if it is of that shape."""
        slots = self._groups[group]
        return slots.row if slots.shape == shape else None

    def load(self, group: GroupId) -> float:
        """Summed duty of the group's residents."""
        slots = self._groups[group]
        return float(slots.table.load[slots.row])

    def shapes(self, gpus: int, node_type: str) -> list[Shape]:
        """Shapes of that size that exist; of every type where `node_type` is empty."""
        return sorted(
            shape
            for shape in self._tables
            if shape.gpus == gpus and node_type in ("", shape.node_type)
        )

    def table(self, shape: Shape) -> ShapeTable:
        """All groups of a shape."""
        return self._tables[shape]

    def gang_feasible(self, node_type: str, gpus: int, duration_slots: int) -> bool:
        """Whether at any time `gpus` are free for as long: the test before any group is looked at.

        With an empty type: of any one type."""
        for shape in self._tables:
            if shape.gpus == gpus and node_type in ("", shape.node_type):
                group = self._tables[shape].least_loaded()
                # Its own GPUs are enough, as mostly: the profile need not be brought up to date.
                if group is not None and self._is_free_for(group, duration_slots):
                    return True
        types = [node_type] if node_type else sorted(self._profiles)
        for each in types:
            if self.profile(each).first_fit(0, duration_slots, gpus) is not None:
                return True
        return False

    def _is_free_for(self, group: GroupId, duration_slots: int) -> bool:
        """Whether nobody in the group is busy in so many slots running, before the ring's end."""
        begins = ~self._groups[group].busy_of_all() & ((1 << self.horizon_slots) - 1)
        length = 1
        while begins and length < duration_slots:
            more = min(length, duration_slots - length)
            begins &= begins >> more
            length += more
        return bool(begins)

    def check_equal(self, other: "CapacityIndex") -> None:
        """Assert that both say the same of every group and slot, whatever their histories."""
        assert self._groups.keys() == other._groups.keys(), "the groups differ"
        for name, mine in self._groups.items():
            theirs = other._groups[name]
            assert mine.footprints == theirs.footprints, f"{name}: the footprints differ"
            table, row = mine.table, mine.row
            their_table, their_row = theirs.table, theirs.row
            for column in ("serial", "load", "host_bytes_free", "state_bytes_free", "is_open"):
                ours, others = getattr(table, column)[row], getattr(their_table, column)[their_row]
                assert ours == others, f"{name}: {column} is {ours}, not {others}"
        for node_type in self._profiles.keys() | other._profiles.keys():
            ours, others = self.profile(node_type).values(), other.profile(node_type).values()
            assert (ours == others).all(), f"the profile of {node_type!r} differs"

    def _table(self, shape: Shape) -> ShapeTable:
        found = self._tables.get(shape)
        if found is None:
            found = self._tables[shape] = ShapeTable(shape, self.horizon_slots)
        return found
