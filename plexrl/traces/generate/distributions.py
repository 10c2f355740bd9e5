"""Distributions by their quantile functions, so that each draw needs one uniform number. Pure.

`plexrl.traces.generate.fitting` fits them to numbers.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Protocol

STANDARD = NormalDist()
EDGE = 1e-12
"""Distance from 0 and 1, where unbounded distributions have no quantile."""


class Distribution(Protocol):
    """A distribution of positive numbers."""

    def quantile(self, part: float) -> float:
        """The quantile at probability `part`, from 0 to 1."""
        ...

    def describe(self) -> str:
        """Name and parameters as text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """F(x) = 1 - exp(-x / mean)."""

    mean: float

    def quantile(self, part: float) -> float:
        """See `Distribution`."""
        return -self.mean * math.log1p(-min(part, 1.0 - EDGE))

    def describe(self) -> str:
        """See `Distribution`."""
        return f"exponential(mean {self.mean:.4g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """The logarithm is normal."""

    mu: float
    sigma: float

    def quantile(self, part: float) -> float:
        """See `Distribution`."""
        inside = min(max(part, EDGE), 1.0 - EDGE)
        return math.exp(self.mu + self.sigma * STANDARD.inv_cdf(inside))

    def describe(self) -> str:
        """See `Distribution`."""
        return f"lognormal(median {math.exp(self.mu):.4g}, sigma {self.sigma:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """F(x) = 1 - exp(-(x / scale)^shape)."""

    scale: float
    shape: float

    def quantile(self, part: float) -> float:
        """See `Distribution`."""
        return float(self.scale * (-math.log1p(-min(part, 1.0 - EDGE))) ** (1.0 / self.shape))

    def describe(self) -> str:
        """See `Distribution`."""
        return f"Weibull(scale {self.scale:.4g}, shape {self.shape:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Empirical quantiles at given probabilities, interpolated in the logarithm (near 0: in the
    value)."""

    parts: tuple[float, ...]
    """Probabilities, ascending from 0 to 1."""
    values: tuple[float, ...]
    """Quantiles at these probabilities, ascending."""

    def quantile(self, part: float) -> float:
        """See `Distribution`."""
        at = min(bisect_right(self.parts, part), len(self.parts) - 1)
        low, high = self.values[at - 1], self.values[at]
        share = (part - self.parts[at - 1]) / (self.parts[at] - self.parts[at - 1])
        share = min(max(share, 0.0), 1.0)
        if low < 1.0:
            return low + share * (high - low)
        return float(low * (high / low) ** share)

    def describe(self) -> str:
        """See `Distribution`."""
        return f"{len(self.parts)} quantiles (median {self.quantile(0.5):.4g})"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bins (from, to, weight) of whole numbers, ends included, uniform within each bin."""

    bins: tuple[tuple[float, float, float], ...]
    ends: tuple[float, ...] = ()
    """Cumulative probabilities at the ends of the bins, computed from the bins."""

    def __post_init__(self) -> None:
        total = math.fsum(part for _, _, part in self.bins)
        ends = tuple(accumulate(part / total for _, _, part in self.bins))
        object.__setattr__(self, "ends", ends)

    def quantile(self, part: float) -> float:
        """See `Distribution`."""
        at = min(bisect_right(self.ends, part), len(self.bins) - 1)
        begin = self.ends[at - 1] if at else 0.0
        low, high, _ = self.bins[at]
        width = self.ends[at] - begin
        share = min(max((part - begin) / width, 0.0), 1.0 - EDGE) if width > 0 else 0.0
        return math.floor(low + share * (high - low + 1.0))

    def describe(self) -> str:
        """See `Distribution`."""
        return f"histogram of {len(self.bins)} bins (median {self.quantile(0.5):.4g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A discrete distribution of values with weights."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    def quantile(self, part: float) -> float:
        """See `Distribution`."""
        total = math.fsum(self.weights)
        ends = accumulate(weight / total for weight in self.weights)
        return next(
            (value for value, end in zip(self.values, ends, strict=True) if part < end),
            self.values[-1],
        )

    def describe(self) -> str:
        """See `Distribution`."""
        return f"{len(self.values)} values with weights"
