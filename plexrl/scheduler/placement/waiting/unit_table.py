"""The waiting units as columns of numbers, so that a pass looks at all of them in a few operations.

A row holds one unit. It keeps its number until the unit leaves, so a pass may place units while it
walks over rows. The order of rows depends on history and must decide nothing.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.placement.waiting.units import EquivalenceClass, Sizes, Unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS_MIN = 64
"""Rows of an empty table. The table is never less than a quarter full beyond these."""

ValueT = TypeVar("ValueT")


class Numbering(Generic[ValueT]):
    """Small numbers for the values in use; a number without a use is given again."""

    def __init__(self) -> None:
        self.values: list[ValueT | None] = []
        """The value of each number."""
        self._numbers: dict[ValueT, int] = {}
        self._uses: list[int] = []
        self._unused: list[int] = []

    def take(self, value: ValueT) -> int:
        """The number of a value, which has one more use."""
        number = self._numbers.get(value)
        if number is None:
            if self._unused:
                number = self._unused.pop()
                self.values[number] = value
            else:
                number = len(self.values)
                self.values.append(value)
                self._uses.append(0)
            self._numbers[value] = number
        self._uses[number] += 1
        return number

    def number(self, value: ValueT) -> int | None:
        """The number of a value; None: the value is not in use."""
        return self._numbers.get(value)

    def in_use(self) -> Iterable[ValueT]:
        """The values in use."""
        return self._numbers

    def release(self, number: int) -> None:
        """The value has one use less."""
        self._uses[number] -= 1
        if not self._uses[number]:
            value = self.values[number]
            assert value is not None, "a number in use has a value"
            del self._numbers[value]
            self.values[number] = None
            self._unused.append(number)


class UnitTable:
    """All units in the queue. Each column is indexed by row."""

    def __init__(self) -> None:
        self._reset(ROWS_MIN)

    def _reset(self, rows: int) -> None:
        self.units: list[Unit | None] = [None] * rows
        self.is_used: NDArray[np.bool_] = np.zeros(rows, bool)
        self.created_at: NDArray[np.float64] = np.zeros(rows)
        self.serial: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.priority: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.expected_s: NDArray[np.float64] = np.zeros(rows)
        """Expected length, rounded by `expected_step`."""
        self.duty: NDArray[np.float64] = np.zeros(rows)
        self.state_bytes: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.has_profile: NDArray[np.bool_] = np.zeros(rows, bool)
        self.tenant: NDArray[np.int64] = np.zeros(rows, np.int64)
        """Number of its tenant in `tenants`; likewise the next two."""
        self.sizes: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.kind: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.tenants: Numbering[TenantId] = Numbering()
        self.all_sizes: Numbering[Sizes] = Numbering()
        self.kinds: Numbering[tuple[Sizes, EquivalenceClass]] = Numbering()
        self._rows: dict[DeploymentId, int] = {}
        """The row of each unit, by the name of its head."""
        self._free = list(range(rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        """Remove all units."""
        self._reset(ROWS_MIN)

    def row(self, head: DeploymentId) -> int:
        """The row of the unit with this head."""
        return self._rows[head]

    def add(self, unit: Unit) -> None:
        """Add a unit; rows may get other numbers."""
        if not self._free or len(self.units) > max(ROWS_MIN, 8 * (len(self._rows) + 1)):
            self._resize()
        self._fill(self._free.pop(), unit)

    def remove(self, head: DeploymentId) -> None:
        """Remove a unit; the other rows keep their numbers."""
        row = self._rows.pop(head)
        self.units[row] = None
        self.is_used[row] = False
        self.tenants.release(int(self.tenant[row]))
        self.all_sizes.release(int(self.sizes[row]))
        self.kinds.release(int(self.kind[row]))
        self._free.append(row)

    def replace(self, unit: Unit) -> None:
        """The unit with this head has another demand."""
        row = self._rows[unit.head.name]
        self.kinds.release(int(self.kind[row]))
        self._set_demand(row, unit)

    def _resize(self) -> None:
        units = [unit for unit in self.units if unit is not None]
        self._reset(max(ROWS_MIN, 2 * (len(units) + 1)))
        for unit in units:
            self._fill(self._free.pop(), unit)

    def _fill(self, row: int, unit: Unit) -> None:
        head, equivalence = unit.head, unit.equivalence
        self._rows[head.name] = row
        self.is_used[row] = True
        self.created_at[row] = head.created_at
        self.serial[row] = head.serial
        self.priority[row] = equivalence.owner.priority
        self.expected_s[row] = equivalence.expected_s
        self.state_bytes[row] = head.state_bytes
        self.tenant[row] = self.tenants.take(equivalence.owner.tenant)
        self.sizes[row] = self.all_sizes.take(unit.sizes)
        self._set_demand(row, unit)

    def _set_demand(self, row: int, unit: Unit) -> None:
        self.units[row] = unit
        self.duty[row] = unit.head.duty
        demand = unit.equivalence.demand
        self.has_profile[row] = any(trace is not None for _, trace, _ in demand)
        self.kind[row] = self.kinds.take((unit.sizes, unit.equivalence))
