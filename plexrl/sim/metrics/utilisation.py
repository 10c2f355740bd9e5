"""A time series with a bounded number of bins, whose width doubles as time goes on. Pure."""

import numpy as np
import numpy.typing as npt

from plexrl.sim.results.result import SERIES_BINS

FIRST_WIDTH_S = 1.0
FLUSH_AT = 4096
"""Intervals per batch."""


class Series:
    """Sums levels over intervals of time (GPUs times seconds), bin by bin.

    Each bin receives the exact part of an interval that it covers, so sums stay exact when bins are
    merged in pairs.
    """

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self._bins: npt.NDArray[np.float64] = np.zeros(SERIES_BINS)
        self._buffer: list[float] = []

    def add(self, start_s: float, end_s: float, level: float) -> None:
        """Add `level` from `start_s` to `end_s`, both at least 0; calls may come in any order."""
        self._buffer += (start_s, end_s, level)
        if len(self._buffer) >= 3 * FLUSH_AT:
            self._flush()

    def levels(self, end_s: float) -> list[tuple[float, float]]:
        """(start, mean level) of each bin up to `end_s`; the last mean covers its part up to
        then."""
        self._flush()
        found = []
        for number, amount in enumerate(self._bins.tolist()):
            start_s = number * self.width_s
            if start_s >= end_s:
                break
            found.append((start_s, amount / (min(start_s + self.width_s, end_s) - start_s)))
        return found

    @property
    def end_s(self) -> float:
        """End of the last bin."""
        self._flush()
        return self.width_s * SERIES_BINS

    def reach(self, end_s: float) -> None:
        """Merge bins in pairs until the last one ends at `end_s` or later."""
        while end_s > self.width_s * SERIES_BINS:
            joined = self._bins.reshape(-1, 2).sum(axis=1)
            self._bins = np.concatenate((joined, np.zeros(SERIES_BINS - len(joined))))
            self.width_s *= 2

    def _flush(self) -> None:
        if not self._buffer:
            return
        starts, ends, levels = np.array(self._buffer).reshape(-1, 3).T
        self._buffer.clear()
        self.reach(float(ends.max()))
        width_s = self.width_s
        first = np.minimum(starts // width_s, SERIES_BINS - 1).astype(np.int64)
        last = np.minimum(ends // width_s, SERIES_BINS - 1).astype(np.int64)
        # The first and the last bin get the part of an interval up to their inner edges, and the
        # bins between get the full level by a cumulative sum of rises and falls. If both are the
        # same bin, the fall comes before the rise and corrects the double count.
        outer = np.bincount(first, levels * ((first + 1) * width_s - starts), SERIES_BINS)
        outer += np.bincount(last, levels * (ends - last * width_s), SERIES_BINS)
        rises = np.bincount(first + 1, levels, SERIES_BINS + 1)
        falls = np.bincount(last, levels, SERIES_BINS + 1)
        self._bins += outer + np.cumsum(rises - falls)[:SERIES_BINS] * width_s
