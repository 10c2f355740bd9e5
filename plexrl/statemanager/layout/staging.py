"""Runs by where they arrive: what of them falls into a stretch of the target's memory. Pure.

A target that is written to in long pieces only (a device, over a bus) is filled window by window:
the runs of a window are brought together in a buffer, wherever they come from, and then moved.
"""

from dataclasses import replace

import numpy as np

from plexrl.statemanager.layout.plan.columns import ITEM_BYTES, Ints
from plexrl.statemanager.layout.strided_copies import BYTES_CAST, Runs, concatenated


class TargetWindows:
    """Runs in order of the window that they begin in; made once, asked window by window."""

    def __init__(self, runs: Runs, window_bytes: int) -> None:
        """`window_bytes` is a power of two of at least 4096, so that no element lies in two."""
        assert window_bytes >= 4096
        assert not window_bytes & (window_bytes - 1)
        self._window_bytes = window_bytes
        order = np.argsort(runs.targets, kind="stable")
        self._runs = runs.chosen(order)
        self._row_bytes = self._runs.row_bytes()
        ends = (self._runs.counts - 1) * self._runs.target_strides + self._row_bytes
        self._ends: Ints = self._runs.targets + ends

    def windows(self) -> list[int]:
        """The places at which windows begin that something may arrive in, ascending."""
        first = self._runs.targets // self._window_bytes
        last = (self._ends - 1) // self._window_bytes
        found: set[int] = set()
        for low, high in zip(first.tolist(), last.tolist(), strict=True):
            found.update(range(low, high + 1))
        return [index * self._window_bytes for index in sorted(found)]

    def runs(self, window: int) -> Runs:
        """What arrives in the window that begins at `window`, its targets counted from there."""
        end = window + self._window_bytes
        behind = int(np.searchsorted(self._runs.targets, end))
        touching = np.flatnonzero(self._ends[:behind] > window)
        mine = self._runs.chosen(touching)
        row_bytes = self._row_bytes[touching]
        # A run of one row has no stride; any that is long enough does.
        steps = np.maximum(mine.target_strides, row_bytes)
        first = np.clip(-((mine.targets - window) // steps), 0, mine.counts)
        behind_rows = (end - mine.targets - row_bytes) // steps + 1
        last = np.maximum(first, np.clip(behind_rows, 0, mine.counts))
        whole = replace(
            mine,
            places=mine.places + first * mine.strides,
            targets=mine.targets + first * mine.target_strides,
            counts=last - first,
        ).chosen(last > first)
        # The row that begins before the window, and the one that ends behind it.
        before = np.flatnonzero(first > 0)
        after = np.flatnonzero(last < mine.counts)
        found = concatenated(
            [
                whole,
                _part(mine, before, first[before] - 1, window, end),
                _part(mine, after, last[after], window, end),
            ]
        )
        return replace(found, targets=found.targets - window)


def covered(runs: Runs) -> list[tuple[int, int]]:
    """(start, bytes) of what the runs fill at the target, ascending, in as few pieces as may be."""
    row_bytes = runs.row_bytes()
    is_dense = (runs.counts == 1) | (runs.target_strides == row_bytes)
    dense = np.flatnonzero(is_dense)
    loose = np.flatnonzero(~is_dense)
    row = np.repeat(loose, runs.counts[loose])
    sizes = runs.counts[loose]
    index = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    starts = np.concatenate(
        [runs.targets[dense], runs.targets[row] + index * runs.target_strides[row]]
    )
    lengths = np.concatenate([row_bytes[dense] * runs.counts[dense], row_bytes[row]])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + lengths)[order]
    if not len(starts):
        return []
    begins = np.flatnonzero(np.append(True, starts[1:] != ends[:-1]))
    lasts = np.append(begins[1:] - 1, len(starts) - 1)
    return list(zip(starts[begins].tolist(), (ends[lasts] - starts[begins]).tolist(), strict=True))


def _part(runs: Runs, chosen: Ints, rows: Ints, window: int, end: int) -> Runs:
    """Of one row of each of the chosen runs, what arrives between `window` and `end`."""
    mine = runs.chosen(chosen)
    is_cast = mine.casts != BYTES_CAST
    codes = np.where(is_cast, mine.casts, 0)
    held = np.where(is_cast, ITEM_BYTES[codes // len(ITEM_BYTES)], 1)
    wanted = np.where(is_cast, ITEM_BYTES[codes % len(ITEM_BYTES)], 1)
    starts = mine.targets + rows * mine.target_strides
    begin = np.maximum(starts, window)
    stop = np.minimum(starts + mine.items * wanted, end)
    skipped = (begin - starts) // wanted
    zeros = np.zeros_like(begin)
    found = replace(
        mine,
        places=mine.places + rows * mine.strides + skipped * held,
        targets=begin,
        items=(stop - begin) // wanted,
        counts=zeros + 1,
        strides=zeros,
        target_strides=zeros,
    )
    return found.chosen(stop > begin)
