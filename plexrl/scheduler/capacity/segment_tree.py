"""Free capacity over the ring: a lazy segment tree with range-add, range-min and first fit.

The tree has two levels and a fan-out of about √H instead of many levels and two: numpy adds to or
takes the minimum of a hundred neighbouring values in the time of one Python call, so a wide node
costs what a narrow one does and the path to a leaf is one step. `benchmarks/scheduler.py` has it
beside a binary tree. A range-add touches the two blocks at its ends and adds lazily to whole blocks
between them (PlexRL §5.2.1).
"""

import math

import numpy as np
from numpy.typing import NDArray

Ring = NDArray[np.int32]


class SegmentTree:
    """Integers on a ring of `size` slots. Ranges are [start, stop), start in [0, size), and may
    wrap: stop ≤ start + size."""

    def __init__(self, size: int, value: int = 0) -> None:
        self.size = size
        self._width = max(1, math.isqrt(size))
        blocks = -(-size // self._width)
        # Slots behind the ring's end never are the minimum, nor free: no query reaches them.
        self._leaves: Ring = np.zeros(blocks * self._width, dtype=np.int32)
        self._leaves[:size] = value
        self._leaves[size:] = np.iinfo(np.int32).max // 2
        self._table = self._leaves.reshape(blocks, self._width)
        self._lazy: Ring = np.zeros(blocks, dtype=np.int32)
        self._lows: Ring = self._table.min(axis=1)

    def add(self, start: int, stop: int, delta: int) -> None:
        """Add `delta` to every slot of the range."""
        for low, high in self._parts(start, stop):
            first, last = low // self._width, (high - 1) // self._width
            if first == last:
                self._add_inside(first, low, high, delta)
                continue
            self._add_inside(first, low, (first + 1) * self._width, delta)
            self._add_inside(last, last * self._width, high, delta)
            self._lazy[first + 1 : last] += delta
            self._lows[first + 1 : last] += delta

    def add_pattern(self, pattern: Ring) -> None:
        """Add a value to every slot: [size] int32. One pass, however many ranges it holds."""
        self._leaves[: self.size] += pattern
        self._lows = self._table.min(axis=1) + self._lazy

    def min(self, start: int, stop: int) -> int:
        """The smallest value in the range."""
        return min(self._min_part(low, high) for low, high in self._parts(start, stop))

    def first_fit(self, start: int, duration: int, need: int) -> int | None:
        """The first slot from `start`, once round the ring, at which every one of the next
        `duration` slots holds at least `need`; None where there is none.

        O(blocks + width · blocks that hold both kinds of slot)."""
        if duration > self.size:
            return None
        short = self._short_slots(need)
        if short.size == 0:
            return start
        if duration == 0:
            return start
        at = int(np.searchsorted(short, start))
        next_short = int(short[at]) if at < short.size else int(short[0]) + self.size
        if next_short - start >= duration:
            return start
        # Behind every short slot a free run begins; the one that `start` stands in comes last.
        lengths = np.diff(short, append=short[0] + self.size) - 1
        order = np.concatenate([np.arange(at, short.size), np.arange(at)])
        fits = order[lengths[order] >= duration]
        return None if fits.size == 0 else int(short[fits[0]] + 1) % self.size

    def values(self) -> Ring:
        """A copy of every slot: [size] int32."""
        return (self._table + self._lazy[:, None]).reshape(-1)[: self.size].copy()

    def _short_slots(self, need: int) -> NDArray[np.intp]:
        """Slots below `need`, ascending; only blocks whose minimum is below it are looked into."""
        blocks = np.flatnonzero(self._lows < need)
        if blocks.size == 0:
            return blocks
        inside = self._table[blocks] + self._lazy[blocks, None] < need
        rows, columns = np.nonzero(inside)
        return blocks[rows] * self._width + columns

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        assert 0 <= start < self.size, f"{start} is no slot of a ring of {self.size}"
        assert start < stop <= start + self.size, f"[{start}, {stop}) is no range of the ring"
        if stop <= self.size:
            return [(start, stop)]
        return [(start, self.size), (0, stop - self.size)]

    def _add_inside(self, block: int, low: int, high: int, delta: int) -> None:
        self._leaves[low:high] += delta
        self._lows[block] = self._table[block].min() + self._lazy[block]

    def _min_part(self, low: int, high: int) -> int:
        first, last = low // self._width, (high - 1) // self._width
        if first == last:
            return int(self._leaves[low:high].min() + self._lazy[first])
        ends = (
            self._leaves[low : (first + 1) * self._width].min() + self._lazy[first],
            self._leaves[last * self._width : high].min() + self._lazy[last],
        )
        lowest = int(min(ends))
        if last - first > 1:
            lowest = min(lowest, int(self._lows[first + 1 : last].min()))
        return lowest
