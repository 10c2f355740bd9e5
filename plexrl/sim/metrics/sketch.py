"""Summarises millions of values in a few kilobytes (DDSketch, VLDB 2019). Pure.

Values are counted in buckets whose edges grow by a constant ratio, so that any quantile has a
relative error of at most `ERROR`. Count, mean, minimum and maximum are exact.
"""

import math

import numpy as np

from plexrl.sim.results.result import CDF_POINTS, DistributionSummary

ERROR = 0.01
"""Relative error of a quantile."""

SMALLEST = 1e-6
"""Smaller values count as 0: differences of clock readings are no more exact."""

FLUSH_AT = 4096
"""Values per batch: one by one they would cost five times as much."""

_RATIO = (1 + ERROR) / (1 - ERROR)
_LOG_RATIO = math.log(_RATIO)
_OFFSET = 1 - math.floor(math.log(SMALLEST) / _LOG_RATIO)
"""Makes every bucket's number positive, so that its sign can be the sign of its values."""


class Sketch:
    """Counts values of either sign; memory grows with the logarithm of their range."""

    def __init__(self) -> None:
        self._buffer: list[float] = []
        self._buckets: dict[int, int] = {}
        """Counts by bucket number, ascending with the values; bucket 0 counts zeros."""
        self._count = 0
        self._total = 0.0
        self._lowest = math.inf
        self._highest = -math.inf

    def add(self, value: float) -> None:
        """Count a finite value."""
        self._buffer.append(value)
        if len(self._buffer) >= FLUSH_AT:
            self._flush()

    def distribution(self) -> DistributionSummary:
        """The distribution of all values so far; all figures are 0 without any value."""
        self._flush()
        if not self._count:
            return DistributionSummary(count=0, mean=0.0, median=0.0, p95=0.0, p99=0.0, highest=0.0)
        return DistributionSummary(
            count=self._count,
            mean=self._total / self._count,
            median=self.quantile(0.5),
            p95=self.quantile(0.95),
            p99=self.quantile(0.99),
            highest=self._highest,
            cdf=self._cdf(),
        )

    def quantile(self, part: float) -> float:
        """The `part`-quantile, to a relative `ERROR`."""
        self._flush()
        assert self._count, "nothing was added"
        rank = max(1, math.ceil(part * self._count))
        below = 0
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            if below >= rank:
                return self._within(_middle(bucket))
        raise AssertionError(f"buckets hold {below} values of {self._count}")

    def _cdf(self) -> tuple[tuple[float, float], ...]:
        """The CDF at `CDF_POINTS` points or fewer; the last point is the exact maximum."""
        points: list[tuple[float, float]] = []
        below = last = 0
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            if (below - last) * (CDF_POINTS - 1) >= self._count and below < self._count:
                last = below
                points.append((self._within(_upper_edge(bucket)), below / self._count))
        return (*points, (self._highest, 1.0))

    def _within(self, value: float) -> float:
        return min(max(value, self._lowest), self._highest)

    def _flush(self) -> None:
        if not self._buffer:
            return
        values = np.array(self._buffer)
        assert np.isfinite(values).all(), "a value is not finite"
        sizes = np.abs(values)
        with np.errstate(divide="ignore"):
            numbers = np.ceil(np.log(sizes) / _LOG_RATIO) + _OFFSET
        numbers = np.where(sizes <= SMALLEST, 0.0, np.copysign(numbers, values))
        found, counts = np.unique(numbers.astype(np.int64), return_counts=True)
        for bucket, count in zip(found.tolist(), counts.tolist(), strict=True):
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self._count += len(self._buffer)
        self._total = math.fsum((self._total, *self._buffer))
        self._lowest = min(self._lowest, float(values.min()))
        self._highest = max(self._highest, float(values.max()))
        self._buffer.clear()


def _upper_edge(bucket: int) -> float:
    """The largest value that the bucket can hold."""
    if bucket == 0:
        return 0.0
    if bucket < 0:
        return -math.exp((-bucket - _OFFSET - 1) * _LOG_RATIO)
    return math.exp((bucket - _OFFSET) * _LOG_RATIO)


def _middle(bucket: int) -> float:
    """A value within `ERROR` of every value of the bucket."""
    if bucket == 0:
        return 0.0
    size = math.exp((abs(bucket) - _OFFSET) * _LOG_RATIO) * 2 / (1 + _RATIO)
    return math.copysign(size, bucket)
