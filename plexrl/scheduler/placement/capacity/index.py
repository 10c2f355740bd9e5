"""The capacity index: who is busy when, on which GPUs (PlexRL §4.3.1, §5.2.1).

Two levels. The first level keeps the node groups of one size and type as flat arrays: load, memory
and members, so that one pass drops all groups that cannot take a job. The second level keeps the
busy slots of each group on the ring, folded to the period of the job that searches.

A reservation subtracts a footprint from its group over the whole ring, or changes nothing.
Footprints change every few cycles and searches come with a placement only, so the busy slots and
the folds of a group are computed when a search reads them. The nodes, the groups and the residents'
footprints determine everything here: after a restart the index is rebuilt and decides as before.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plexrl.errors import CapacityError
from plexrl.ids import DeploymentId, GroupId
from plexrl.scheduler.placement.capacity.shift_search import PeriodProfiles, ShiftFit, ShiftSearch
from plexrl.scheduler.state.demand.trace import Footprint

PERIOD_PROFILES_MAX = 32
"""Period profiles kept, one for each recently used number of cycles."""


CANDIDATES_PER_PASS = 256
"""Groups searched at a time, the least loaded first; the first pass with a fit ends the search.
This bounds the cost of a decision, as does the percentage of nodes that kube-scheduler scores. The
groups left out are fuller than all groups that were searched."""


@dataclass(frozen=True, slots=True, order=True)
class CapacityShape:
    """Groups of equal shape are interchangeable for a job."""

    node_type: str
    gpu_memory_bytes: int
    """Per GPU."""
    gpus: int
    gpu_kind: str = ""
    """Name of the GPUs; empty: they are virtual."""


@dataclass(slots=True)
class GroupSlots:
    """The reservations of one group."""

    group: GroupId
    shape: CapacityShape
    table: "ShapeTable"
    """The table with the group's row."""
    row: int
    footprints: dict[DeploymentId, Footprint] = field(default_factory=dict)
    intervals: dict[DeploymentId, NDArray[np.int64]] = field(default_factory=dict)
    """The footprints' intervals on the ring; computed on first use, as is `busy`."""
    busy: dict[DeploymentId, int] = field(default_factory=dict)
    """`Footprint.busy`."""
    duties: dict[DeploymentId, float] = field(default_factory=dict)

    def busy_of(self, deployment: DeploymentId) -> int:
        """The busy slots of one resident, one bit each."""
        found = self.busy.get(deployment)
        if found is None:
            found = self.busy[deployment] = self.footprints[deployment].busy()
        return found

    def intervals_of(self, deployment: DeploymentId) -> NDArray[np.int64]:
        """The intervals of one resident's footprint."""
        found = self.intervals.get(deployment)
        if found is None:
            found = self.intervals[deployment] = self.footprints[deployment].intervals()
        return found

    def busy_of_all(self) -> int:
        """The busy slots of all residents, one bit each."""
        found = 0
        for deployment in self.footprints:
            found |= self.busy_of(deployment)
        return found


class ShapeTable:
    """All groups of one shape, one row each. Rows of removed groups are reused."""

    def __init__(self, shape: CapacityShape, horizon_slots: int) -> None:
        self._shape = shape
        self._horizon_slots = horizon_slots
        self.groups: list[GroupId | None] = []
        self._slots: list[GroupSlots | None] = []
        self.versions = np.zeros(0, dtype=np.int64)
        self.serial = np.zeros(0, dtype=np.int64)
        """The group's number; it breaks ties, because row numbers depend on history."""
        self.load = np.zeros(0)
        """Sum of the residents' duties."""
        self.host_bytes_free = np.zeros(0, dtype=np.int64)
        """Largest state of one more member that fits into host memory."""
        self.state_bytes_free = np.zeros(0, dtype=np.int64)
        """Largest state of one more member that fits into host memory and NVMe."""
        self.device_kept = np.zeros(0, dtype=np.int64)
        """Bytes that all members keep on each GPU while offloaded; of real GPUs only."""
        self.device_most = np.zeros(0, dtype=np.int64)
        """The most that one member needs on a GPU besides what it keeps; of real GPUs only."""
        self.members = np.zeros(0, dtype=np.int64)
        self.is_open = np.zeros(0, dtype=bool)
        self._free_rows: list[int] = []
        self._changes = 0
        self._period_profiles: OrderedDict[int, PeriodProfiles] = OrderedDict()

    def add(self, group: GroupId, serial: int) -> GroupSlots:
        """Add a row for `group`."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.groups[row] = group
        slots = self._slots[row] = GroupSlots(group=group, shape=self._shape, table=self, row=row)
        self.serial[row] = serial
        self.changed(row)
        return slots

    def remove(self, row: int) -> None:
        """Free the row."""
        self.groups[row] = self._slots[row] = None
        self.load[row] = 0.0
        self.members[row] = 0
        self.is_open[row] = False
        self.device_kept[row] = self.device_most[row] = 0
        self.changed(row)
        self._free_rows.append(row)

    def fit_on_device(self, need_bytes: int, kept_bytes: int) -> NDArray[np.bool_]:
        """Rows on whose GPUs one more member fits that needs and keeps so much: [rows] bool. Each
        GPU holds what all keep there, with what any one of them needs to work."""
        most = np.maximum(self.device_most, need_bytes - kept_bytes)
        return self.device_kept + kept_bytes + most <= self._shape.gpu_memory_bytes

    @property
    def gpus(self) -> int:
        """GPUs of each group."""
        return self._shape.gpus

    @property
    def is_virtual(self) -> bool:
        """Whether its GPUs are virtual, and only states count in their memory."""
        return not self._shape.gpu_kind

    def changed(self, row: int) -> None:
        """Note that the residents of the row have changed."""
        self._changes += 1
        self.versions[row] = self._changes

    def search(self, rows: NDArray[np.intp], wanted: ShiftSearch) -> list[ShiftFit]:
        """The best shift of each row that has a fit."""
        cycles = wanted.footprint.cycles
        table = self._period_profiles.get(cycles)
        if table is None:
            table = PeriodProfiles(self._horizon_slots, cycles)
            self._period_profiles[cycles] = table
            if len(self._period_profiles) > PERIOD_PROFILES_MAX:
                self._period_profiles.popitem(last=False)
        self._period_profiles.move_to_end(cycles)
        table.refresh(rows, self.versions, self._intervals)
        return table.search(rows, wanted)

    def _intervals(self, row: int) -> list[NDArray[np.int64]]:
        """The intervals of the residents' footprints."""
        slots = self._slots[row]
        if slots is None:
            return []
        return [slots.intervals_of(deployment) for deployment in slots.footprints]

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
            "device_kept",
            "device_most",
            "members",
        ):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, dtype=column.dtype)]))
        self.is_open = np.concatenate([self.is_open, np.zeros(more, dtype=bool)])
        # The lowest row is used first.
        self._free_rows = list(range(size + more - 1, size - 1, -1))


class CapacityIndex:
    """The reservations of all groups on the ring."""

    def __init__(self, horizon_slots: int) -> None:
        self.horizon_slots = horizon_slots
        self._groups: dict[GroupId, GroupSlots] = {}
        self._tables: dict[CapacityShape, ShapeTable] = {}

    # The cluster

    def add_group(self, group: GroupId, shape: CapacityShape, serial: int) -> None:
        """Add a new, empty group. Searches ignore it until `update_capacity`."""
        assert group not in self._groups, f"{group} is in the index already"
        self._groups[group] = self._table(shape).add(group, serial)

    def remove_group(self, group: GroupId) -> None:
        """Remove a group, with its reservations."""
        slots = self._groups.pop(group)
        slots.table.remove(slots.row)

    def update_capacity(
        self, group: GroupId, *, is_open: bool, host_bytes_free: int, state_bytes_free: int
    ) -> None:
        """Set whether the group accepts members, and how large the next member's state may be."""
        slots = self._groups[group]
        table, row = slots.table, slots.row
        table.is_open[row] = is_open
        table.host_bytes_free[row] = host_bytes_free
        table.state_bytes_free[row] = state_bytes_free

    def update_device(self, group: GroupId, kept: int, most: int) -> None:
        """Set what the members keep on each GPU, and the most that one needs besides."""
        slots = self._groups[group]
        slots.table.device_kept[slots.row] = kept
        slots.table.device_most[slots.row] = most

    # Reservations

    def check_free(self, group: GroupId, deployment: DeploymentId, footprint: Footprint) -> None:
        """Raises `CapacityError` if the group is busy in a segment of the footprint."""
        if footprint.busy() & self._groups[group].busy_of_all():
            raise CapacityError(
                f"group {group!r} is busy during a segment of {deployment!r}: choose another shift "
                "or group",
                group=group,
            )

    def reserve(
        self, group: GroupId, deployment: DeploymentId, footprint: Footprint, duty: float
    ) -> None:
        """Subtract a footprint from the group over the whole ring."""
        slots = self._groups[group]
        assert deployment not in slots.footprints, f"{deployment} has a reservation on {group}"
        slots.footprints[deployment] = footprint
        slots.duties[deployment] = duty
        self._after_change(slots)

    def fill(
        self, group: GroupId, residents: Mapping[DeploymentId, tuple[Footprint, float]]
    ) -> None:
        """Reserve for all residents of an empty group: (footprint, duty) of each."""
        slots = self._groups[group]
        assert not slots.footprints, f"{group} is not empty"
        for deployment, (footprint, duty) in residents.items():
            slots.footprints[deployment] = footprint
            slots.duties[deployment] = duty
        self._after_change(slots)

    def release(self, group: GroupId, deployment: DeploymentId) -> None:
        """Undo `reserve`."""
        slots = self._groups[group]
        del slots.footprints[deployment]
        del slots.duties[deployment]
        self._drop_cached(slots, deployment)
        self._after_change(slots)

    def replace(
        self, group: GroupId, deployment: DeploymentId, footprint: Footprint, duty: float
    ) -> None:
        """Replace the footprint of a resident."""
        slots = self._groups[group]
        slots.footprints[deployment] = footprint
        self._drop_cached(slots, deployment)
        if slots.duties[deployment] == duty:
            # The common case: only the shift changed.
            slots.table.changed(slots.row)
            return
        slots.duties[deployment] = duty
        self._after_change(slots)

    @staticmethod
    def _drop_cached(slots: GroupSlots, deployment: DeploymentId) -> None:
        slots.intervals.pop(deployment, None)
        slots.busy.pop(deployment, None)

    def _after_change(self, slots: GroupSlots) -> None:
        table, row = slots.table, slots.row
        # An exact sum, so that it depends on the members only and not on their history.
        table.load[row] = math.fsum(slots.duties.values())
        table.members[row] = len(slots.footprints)
        slots.table.changed(slots.row)

    # Queries

    def footprint(self, group: GroupId, deployment: DeploymentId) -> Footprint:
        """The footprint that is reserved for a resident."""
        return self._groups[group].footprints[deployment]

    def slots(self, group: GroupId) -> GroupSlots:
        """The reservations of a group."""
        return self._groups[group]

    def row(self, group: GroupId, shape: CapacityShape) -> int | None:
        """The group's row in the table of `shape`; None if it has another shape."""
        slots = self._groups[group]
        return slots.row if slots.shape == shape else None

    def load(self, group: GroupId) -> float:
        """Sum of the duties of the group's residents."""
        slots = self._groups[group]
        return float(slots.table.load[slots.row])

    def shapes(self, gpus: int, node_type: str, *, or_larger: bool = False) -> list[CapacityShape]:
        """Existing shapes of that size, or of larger ones, too; of all types if `node_type` is
        empty."""
        return sorted(
            shape
            for shape in self._tables
            if (shape.gpus == gpus or (or_larger and shape.gpus > gpus))
            and node_type in ("", shape.node_type)
        )

    def table(self, shape: CapacityShape) -> ShapeTable:
        """All groups of a shape."""
        return self._tables[shape]

    def check_equal(self, other: "CapacityIndex") -> None:
        """Assert that both indexes are equal in every group and slot."""
        assert self._groups.keys() == other._groups.keys(), "the groups differ"
        for name, mine in self._groups.items():
            theirs = other._groups[name]
            assert mine.footprints == theirs.footprints, f"{name}: the footprints differ"
            table, row = mine.table, mine.row
            their_table, their_row = theirs.table, theirs.row
            columns = ["serial", "load", "host_bytes_free", "state_bytes_free", "is_open"]
            if mine.shape.gpu_kind:
                columns += ["device_kept", "device_most"]
            for column in columns:
                ours, others = getattr(table, column)[row], getattr(their_table, column)[their_row]
                assert ours == others, f"{name}: {column} is {ours}, not {others}"

    def _table(self, shape: CapacityShape) -> ShapeTable:
        found = self._tables.get(shape)
        if found is None:
            found = self._tables[shape] = ShapeTable(shape, self.horizon_slots)
        return found


def sorted_passes(
    table: ShapeTable, rows: NDArray[np.intp], key: NDArray[np.float64]
) -> "list[NDArray[np.intp]]":
    """`rows` sorted by key and group number, in passes. Of many rows only the first passes are
    sorted and returned."""
    most = 8 * CANDIDATES_PER_PASS
    if rows.size > most:
        bound = np.partition(key[rows], most)[most]
        rows = rows[key[rows] <= bound]
    ordered = rows[np.lexsort((table.serial[rows], key[rows]))][:most]
    return [
        ordered[begin : begin + CANDIDATES_PER_PASS]
        for begin in range(0, ordered.size, CANDIDATES_PER_PASS)
    ]
