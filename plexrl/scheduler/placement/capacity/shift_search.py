"""The micro-shift: where a cycle fits into the time of a group, for all groups and shifts at once.

The owner of the micro-shift criterion: which shifts fit, what each costs, and when a cycle has left
its plan.

A job with `cycles` repetitions touches all slots of the ring that are equal modulo its period. So
the ring of a group is folded to that period: cell j holds the summed weight of all busy slots with
phase j. A shift δ fits strictly if the sum over the shifted segments is 0; otherwise the sum is the
overlap (PlexRL §4.3.2, Eq. 1 and 2). The sum over a segment is a difference of prefix sums, so all
shifts of all groups take two array subtractions per segment. This is the circular cross-correlation
with a box, exact in integers, and faster than an FFT for the few segments that cycles have.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plexrl.scheduler.state.demand.trace import CRITICAL_WEIGHT, Footprint

EPSILON = 1e-6
"""Slots; far below a cell, far above the rounding error of a phase."""

CELLS_PER_CHUNK = 1 << 18
"""Cells searched at once, to stay in the processor's cache."""

PHASE_TOLERANCE = 0.1
"""A cycle leaves its plan when it starts off its slot by more than this part of the period."""


def is_off_plan(started_at: float, shift: float, period: float) -> bool:
    """Whether a cycle that started at `started_at` has left the plan with this shift; in slots."""
    off = (started_at - shift) % period
    return min(off, period - off) > PHASE_TOLERANCE * period


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftSearch:
    """The parameters of a search."""

    footprint: Footprint
    """The job's footprint at shift 0."""
    start_slot: int
    """The slot of the current time; a shift of 0 starts the first cycle there."""
    margin_slots: int
    """Busy slots nearer than this to a segment count as interference, because cycles jitter."""
    interference_weight: float
    """λ of the cost: seconds of setup per second of interference in a cycle."""
    strict: bool
    """Only shifts without overlap; otherwise the overlap is part of the cost."""


class ShiftFit(NamedTuple):
    """The best shift in one row."""

    row: int
    shift_slots: int
    """δ: slots from the start of the search to the first cycle."""
    overlap_s: float
    """Seconds of a cycle in which residents are busy too, summed over residents; time with slack
    counts a quarter. 0 for a strict fit."""
    interference_s: float
    """As `overlap_s`, with each segment extended by the margin on both sides."""
    cost: float
    """λ · interference; `placement.fitting` adds the time to spill to NVMe. The shift itself costs
    nothing, because no job is held back until it comes. The smallest of equal ones is taken."""


class PeriodProfiles:
    """The busy profiles of a set of groups, folded to the period of one number of cycles."""

    def __init__(self, horizon_slots: int, cycles: int) -> None:
        self.cycles = cycles
        self.period = horizon_slots / cycles
        self.cells = math.ceil(self.period)
        self.is_whole = horizon_slots % cycles == 0
        self._rows = np.zeros((0, self.cells), dtype=np.int32)
        self._versions = np.zeros(0, dtype=np.int64)

    def refresh(
        self,
        rows: NDArray[np.intp],
        versions: NDArray[np.int64],
        intervals: Callable[[int], Sequence[NDArray[np.int64]]],
    ) -> None:
        """Fold again the rows that changed since the last fold.

        `versions[row]` changes with the residents of the row; `intervals(row)` returns the
        intervals of their footprints.
        """
        if len(self._rows) < len(versions):
            more = len(versions) - len(self._rows)
            self._rows = np.concatenate([self._rows, np.zeros((more, self.cells), dtype=np.int32)])
            self._versions = np.concatenate([self._versions, np.full(more, -1, dtype=np.int64)])
        stale = rows[self._versions[rows] != versions[rows]]
        if not stale.size:
            return
        self._versions[stale] = versions[stale]
        parts = [intervals(row) for row in stale.tolist()]
        counts = [sum(len(each) for each in part) for part in parts]
        found = [each for part in parts for each in part]
        if not found:
            self._rows[stale] = 0
            return
        lines = np.repeat(np.arange(len(stale)), counts)
        self._rows[stale] = self._fold(np.concatenate(found), lines, len(stale))

    def _fold(
        self, intervals: NDArray[np.int64], lines: NDArray[np.intp], count: int
    ) -> NDArray[np.int32]:
        """Summed weight of ring intervals by line and phase, rounded outward: [count, cells]."""
        lengths = intervals[:, 1] - intervals[:, 0]
        weights = intervals[:, 2].astype(np.float64)
        start = intervals[:, 0] - np.floor(intervals[:, 0] / self.period) * self.period
        stop = start + lengths
        whole_periods = None
        if lengths.max() >= self.period:
            whole_periods = np.floor(lengths / self.period)
            stop = start + (lengths - whole_periods * self.period)
        low = np.floor(start + EPSILON).astype(np.int64)
        high = np.ceil(np.minimum(stop, self.period) - EPSILON).astype(np.int64)
        width = self.cells + 1
        base = lines * width
        size = count * width
        edges = np.bincount(base + low, weights, size)
        edges -= np.bincount(base + high, weights, size)
        if whole_periods is not None:
            # A whole period covers every phase.
            edges += np.bincount(base, whole_periods * weights, size)
        past = stop > self.period + EPSILON
        if past.any():
            over = np.ceil(stop[past] - self.period - EPSILON).astype(np.int64)
            edges += np.bincount(base[past], weights[past], size)
            edges -= np.bincount(base[past] + over, weights[past], size)
        folded = np.cumsum(edges.reshape(count, width)[:, :-1], axis=1)
        return np.rint(folded).astype(np.int32)

    def search(self, rows: NDArray[np.intp], wanted: ShiftSearch) -> list[ShiftFit]:
        """The best shift of every row that has a fit, in the order of `rows`."""
        per_chunk = max(1, CELLS_PER_CHUNK // (3 * self.cells))
        found: list[ShiftFit] = []
        for begin in range(0, len(rows), per_chunk):
            found += self._search_chunk(rows[begin : begin + per_chunk], wanted)
        return found

    def _search_chunk(self, rows: NDArray[np.intp], wanted: ShiftSearch) -> list[ShiftFit]:
        cells = self.cells
        # Three periods: a segment may begin in the first and end in the third.
        sums = np.zeros((len(rows), 3 * cells + 1), dtype=np.int32)
        np.cumsum(self._rows[rows], axis=1, out=sums[:, 1 : cells + 1])
        one_period = sums[:, cells : cells + 1]
        sums[:, cells + 1 : 2 * cells + 1] = sums[:, 1 : cells + 1] + one_period
        sums[:, 2 * cells + 1 :] = sums[:, cells + 1 : 2 * cells + 1] + one_period
        overlap = self._box_sums(sums, wanted, 0)
        near = overlap
        if wanted.margin_slots:
            near = self._box_sums(sums, wanted, wanted.margin_slots)
        per_cycle = 1.0 / (self.cycles * CRITICAL_WEIGHT)
        cost = wanted.interference_weight * per_cycle * near
        if wanted.strict:
            cost = np.where(overlap == 0, cost, np.inf)
        best = cost.argmin(axis=1)
        lines = np.arange(len(rows))
        found = zip(
            rows.tolist(),
            best.tolist(),
            overlap[lines, best].tolist(),
            near[lines, best].tolist(),
            cost[lines, best].tolist(),
            strict=True,
        )
        return [
            ShiftFit(row, shift, slots * per_cycle, slots_near * per_cycle, least)
            for row, shift, slots, slots_near, least in found
            if least != math.inf
        ]

    def _box_sums(
        self, sums: NDArray[np.int32], wanted: ShiftSearch, margin: int
    ) -> NDArray[np.int32]:
        """Summed weight under all segments for every shift: [rows, shifts] int32."""
        shifts = math.floor(self.period)
        phase = wanted.start_slot - math.floor(wanted.start_slot / self.period) * self.period
        # A fractional period rounds the edges differently in each cycle. Two cells on either side
        # cover both the rounding of a cell and that of the wrap.
        margin += 0 if self.is_whole else 2
        total = np.zeros((len(sums), shifts), dtype=np.int32)
        for offset, duration, _ in wanted.footprint.segments:
            low = math.floor(phase + offset) - margin
            high = math.ceil(phase + (offset + duration)) + margin
            high = min(high, low + self.cells)
            low, high = low % self.cells, high - low + low % self.cells
            total += sums[:, high : high + shifts]
            total -= sums[:, low : low + shifts]
        return total
