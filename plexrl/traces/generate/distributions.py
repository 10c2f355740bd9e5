"""Distributions by their quantile functions, so that a draw is one uniform number. Pure.

A law is fitted by `plexrl.traces.generate.fitting` and kept as plain values.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Protocol

STANDARD = NormalDist()
EDGE = 1e-12
"""A uniform draw may be 0, where a law without bounds has no value."""


class Law(Protocol):
    """A distribution of positive numbers."""

    def quantile(self, part: float) -> float:
        """The value that `part` of all draws, 0 to 1, do not exceed."""
        ...

    def describe(self) -> str:
        """Name and parameters, for people."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """F(x) = 1 - exp(-x / mean)."""

    mean: float

    def quantile(self, part: float) -> float:
        """See `Law`."""
        return -self.mean * math.log1p(-min(part, 1.0 - EDGE))

    def describe(self) -> str:
        """See `Law`."""
        return f"exponential(mean {self.mean:.4g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """The logarithm is normal."""

    mu: float
    sigma: float

    def quantile(self, part: float) -> float:
        """See `Law`."""
        inside = min(max(part, EDGE), 1.0 - EDGE)
        return math.exp(self.mu + self.sigma * STANDARD.inv_cdf(inside))

    def describe(self) -> str:
        """See `Law`."""
        return f"lognormal(median {math.exp(self.mu):.4g}, sigma {self.sigma:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """F(x) = 1 - exp(-(x / scale)^shape)."""

    scale: float
    shape: float

    def quantile(self, part: float) -> float:
        """See `Law`."""
        return float(self.scale * (-math.log1p(-min(part, 1.0 - EDGE))) ** (1.0 / self.shape))

    def describe(self) -> str:
        """See `Law`."""
        return f"Weibull(scale {self.scale:.4g}, shape {self.shape:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """What was seen: values at given parts, between them linear in the logarithm (near 0: in the
    value)."""

    parts: tuple[float, ...]
    """Ascending from 0 to 1."""
    values: tuple[float, ...]
    """At those parts, ascending."""

    def quantile(self, part: float) -> float:
        """See `Law`."""
        at = min(bisect_right(self.parts, part), len(self.parts) - 1)
        low, high = self.values[at - 1], self.values[at]
        share = (part - self.parts[at - 1]) / (self.parts[at] - self.parts[at - 1])
        share = min(max(share, 0.0), 1.0)
        if low < 1.0:
            return low + share * (high - low)
        return float(low * (high / low) ** share)

    def describe(self) -> str:
        """See `Law`."""
        return f"{len(self.parts)} quantiles (median {self.quantile(0.5):.4g})"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bins (from, to, weight) of whole numbers, both ends in the bin; uniform inside each."""

    bins: tuple[tuple[float, float, float], ...]
    ends: tuple[float, ...] = ()
    """Parts at which bins end; made from the bins."""

    def __post_init__(self) -> None:
        total = math.fsum(part for _, _, part in self.bins)
        ends = tuple(accumulate(part / total for _, _, part in self.bins))
        object.__setattr__(self, "ends", ends)

    def quantile(self, part: float) -> float:
        """See `Law`."""
        at = min(bisect_right(self.ends, part), len(self.bins) - 1)
        begin = self.ends[at - 1] if at else 0.0
        low, high, _ = self.bins[at]
        width = self.ends[at] - begin
        share = min(max((part - begin) / width, 0.0), 1.0 - EDGE) if width > 0 else 0.0
        return math.floor(low + share * (high - low + 1.0))

    def describe(self) -> str:
        """See `Law`."""
        return f"histogram of {len(self.bins)} bins (median {self.quantile(0.5):.4g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of several values, each with its weight."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    def quantile(self, part: float) -> float:
        """See `Law`."""
        total = math.fsum(self.weights)
        ends = accumulate(weight / total for weight in self.weights)
        return next(
            (value for value, end in zip(self.values, ends, strict=True) if part < end),
            self.values[-1],
        )

    def describe(self) -> str:
        """See `Law`."""
        return f"{len(self.values)} values with weights"
