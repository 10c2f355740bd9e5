"""Fits distributions by maximum likelihood and selects one by the Kolmogorov distance.

D = max |F(x) - G(x)|, of a distribution and a sample, or of two samples. A parametric distribution
is chosen if D ≤ `CLOSE`, else the sample's quantiles, whose D is small except for ties.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plexrl.traces.generate.distributions import (
    Distribution,
    Exponential,
    Lognormal,
    Quantiles,
    Weibull,
)

CLOSE = 0.02
"""Kolmogorov distance up to which a parametric distribution is accepted."""

GRID = 2001
"""Number of probabilities at which a distribution is compared with a sample."""

Numbers = NDArray[np.float64]

_PARTS = (
    *(0.0, 0.001, 0.0025, 0.005),
    *(index / 100 for index in range(1, 100)),
    *(0.995, 0.9975, 0.999, 0.9995, 0.9998, 0.9999, 0.99995, 0.99998, 1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A distribution and its distance from the sample."""

    distribution: Distribution
    distance: float
    tried: dict[str, float]
    """Kolmogorov distance of each candidate, by name."""


def fit(numbers: Sequence[float] | Numbers) -> Fit:
    """The simplest distribution that is close to the sample of numbers of at least 0."""
    seen = np.sort(np.asarray(numbers, dtype=np.float64))
    assert seen.size, "fitting needs at least one number"
    assert seen[0] >= 0, f"fitting needs numbers of at least 0, not {seen[0]}"
    distributions: dict[str, Distribution] = {}
    if seen[0] > 0 and seen[-1] > seen[0]:
        distributions["exponential"] = Exponential(mean=float(seen.mean()))
        logs = np.log(seen)
        distributions["lognormal"] = Lognormal(mu=float(logs.mean()), sigma=float(logs.std()))
        distributions["weibull"] = _weibull(logs)
    distributions["quantiles"] = _quantiles(seen)
    tried = {
        name: kolmogorov_distance(distribution, seen)
        for name, distribution in distributions.items()
    }
    chosen = next((name for name in distributions if tried[name] <= CLOSE), "quantiles")
    return Fit(distribution=distributions[chosen], distance=tried[chosen], tried=tried)


def kolmogorov_distance(distribution: Distribution, numbers: Numbers) -> float:
    """Kolmogorov distance of a distribution and a sorted sample."""
    parts = np.linspace(0.0, 1.0, GRID)[1:-1]
    values = np.array([distribution.quantile(float(part)) for part in parts])
    return distance(values, numbers)


def distance(one: Sequence[float] | Numbers, other: Sequence[float] | Numbers) -> float:
    """Kolmogorov distance of two samples, from 0 to 1."""
    left, right = np.sort(np.asarray(one, float)), np.sort(np.asarray(other, float))
    if not left.size or not right.size:
        return float(left.size != right.size)
    at = np.concatenate([left, right])
    below_left = np.searchsorted(left, at, side="right") / left.size
    below_right = np.searchsorted(right, at, side="right") / right.size
    return float(np.abs(below_left - below_right).max())


def _quantiles(seen: Numbers) -> Quantiles:
    values = np.quantile(seen, _PARTS)
    return Quantiles(parts=_PARTS, values=tuple(float(value) for value in values))


def _weibull(logs: Numbers) -> Weibull:
    """Solve the likelihood equation for the shape by Newton's method."""
    shape = 1.2 / max(1e-6, float(logs.std()))
    top = float(logs.max())
    for _ in range(50):
        # Relative to the largest value, so that powers do not overflow.
        weights = np.exp(shape * (logs - top))
        total = float(weights.sum())
        first = float((weights * logs).sum()) / total
        second = float((weights * logs * logs).sum()) / total
        value = first - 1.0 / shape - float(logs.mean())
        step = value / (second - first * first + 1.0 / shape**2)
        following = max(shape / 4.0, shape - step)
        if abs(following - shape) < 1e-10 * shape:
            break
        shape = following
    mean_power = float(np.exp(shape * (logs - top)).mean())
    return Weibull(scale=math.exp(top + math.log(mean_power) / shape), shape=shape)
