"""Which law numbers follow, and how well: maximum likelihood, judged by the Kolmogorov distance.

D = max |F(x) - G(x)|, of a law against what was seen, or of two samples. A law of two parameters is
taken where D ≤ `CLOSE`, else quantiles of what was seen, whose D is small by construction but for
ties.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plexrl.traces.generate.distributions import Exponential, Law, Lognormal, Quantiles, Weibull

CLOSE = 0.02
"""Kolmogorov distance below which a law stands for the numbers themselves."""

GRID = 2001
"""Parts at which a law is compared with numbers."""

Numbers = NDArray[np.float64]

_PARTS = (
    *(0.0, 0.001, 0.0025, 0.005),
    *(index / 100 for index in range(1, 100)),
    *(0.995, 0.9975, 0.999, 0.9995, 0.9998, 0.9999, 0.99995, 0.99998, 1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A law and its distance from what it was fitted on."""

    law: Law
    distance: float
    tried: dict[str, float]
    """Kolmogorov distance of every law that was tried, by name."""


def fit(numbers: Sequence[float] | Numbers) -> Fit:
    """The simplest law that is close to these numbers, which are at least 0 and not none."""
    seen = np.sort(np.asarray(numbers, dtype=np.float64))
    assert seen.size, "a law is fitted on one number at least"
    assert seen[0] >= 0, f"a law is fitted on numbers of at least 0, not {seen[0]}"
    laws: dict[str, Law] = {}
    if seen[0] > 0 and seen[-1] > seen[0]:
        laws["exponential"] = Exponential(mean=float(seen.mean()))
        logs = np.log(seen)
        laws["lognormal"] = Lognormal(mu=float(logs.mean()), sigma=float(logs.std()))
        laws["weibull"] = _weibull(logs)
    laws["quantiles"] = _quantiles(seen)
    tried = {name: law_distance(law, seen) for name, law in laws.items()}
    chosen = next((name for name in laws if tried[name] <= CLOSE), "quantiles")
    return Fit(law=laws[chosen], distance=tried[chosen], tried=tried)


def law_distance(law: Law, numbers: Numbers) -> float:
    """Kolmogorov distance of a law from sorted numbers."""
    parts = np.linspace(0.0, 1.0, GRID)[1:-1]
    values = np.array([law.quantile(float(part)) for part in parts])
    return distance(values, numbers)


def distance(one: Sequence[float] | Numbers, other: Sequence[float] | Numbers) -> float:
    """Kolmogorov distance of two samples, 0 to 1."""
    left, right = np.sort(np.asarray(one, float)), np.sort(np.asarray(other, float))
    if not left.size or not right.size:
        return float(left.size != right.size)
    at = np.concatenate([left, right])
    below_left = np.searchsorted(left, at, side="right") / left.size
    below_right = np.searchsorted(right, at, side="right") / right.size
    return float(np.abs(below_left - below_right).max())


def _quantiles(seen: Numbers) -> Quantiles:
    values = np.quantile(seen, _PARTS)
    return Quantiles(parts=_PARTS, values=tuple(float(each) for each in values))


def _weibull(logs: Numbers) -> Weibull:
    """By Newton's steps on the likelihood's equation for the shape."""
    shape = 1.2 / max(1e-6, float(logs.std()))
    top = float(logs.max())
    for _ in range(50):
        # Weights by the largest, or the powers overflow.
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
