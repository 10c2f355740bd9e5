"""Relative errors of predictions over several of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors over some cycles."""

    median: float
    mean: float
    p95: float


def errors_of(found: Sequence[float]) -> Errors:
    """Median, mean and 95th percentile."""
    return Errors(median=median(found), mean=fmean(found), p95=p95_of(found))


def p95_of(values: Sequence[float]) -> float:
    """The 95th percentile (nearest rank)."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
