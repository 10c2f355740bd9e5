"""Parses service level objectives of a simulated cluster, such as `wait.p95<=2h`. Pure.

    objective  = metric ("<=" | ">=") number [unit]
    metric     = quantity "." statistic | scalar
    quantity   = wait | normalized_wait | job_slowdown | completion | cycle_slowdown
    statistic  = mean | median | p50 | p95 | p99 | max
    scalar     = drain | cost | worst_tenant | utilisation | gpu_hours_per_cycle | failed_jobs

Times have a unit (s, min, h, d); fractions may be written in percent; costs may end in k or M.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from plexrl.errors import InvalidRequestError
from plexrl.sim.results.result import DistributionSummary, SimResult

Unit = Literal["time", "part", "count", "money"]

SCALES: dict[Unit, dict[str, float]] = {
    "time": {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0},
    "part": {"": 1.0, "%": 0.01},
    "count": {"": 1.0},
    "money": {"": 1.0, "k": 1e3, "M": 1e6},
}
_UNIT_TEXTS: dict[Unit, str] = {
    "time": "a time, as 90s, 30min, 2h or 5d",
    "part": "a number or a percentage, as 0.05 or 5%",
    "count": "a number without a unit",
    "money": "an amount, as 20000, 20k or 1.5M",
}

_QUANTITIES: dict[str, Unit] = {
    "wait": "time",
    "normalized_wait": "part",
    "job_slowdown": "part",
    "completion": "part",
    "cycle_slowdown": "part",
}
_STATISTICS: dict[str, str] = {
    "mean": "mean",
    "median": "median",
    "p50": "median",
    "p95": "p95",
    "p99": "p99",
    "max": "highest",
}


def utilisation(result: SimResult) -> float:
    """Part of the cluster's GPU-hours, until the drain, with an operation other than a move."""
    offered = result.gpus * result.drain_s / 3600.0
    return result.busy_gpu_hours / offered if offered else 0.0


_SCALARS: dict[str, tuple[Unit, Callable[[SimResult], float]]] = {
    "drain": ("time", lambda result: result.drain_s),
    "cost": ("money", lambda result: result.cost),
    "worst_tenant": ("part", lambda result: result.worst_tenant),
    "utilisation": ("part", utilisation),
    "gpu_hours_per_cycle": ("count", lambda result: result.gpu_hours_per_cycle),
    "failed_jobs": ("count", lambda result: float(result.failed_jobs)),
}
_BUDGETS = {"cost", "utilisation", "gpu_hours_per_cycle"}

_FORM = re.compile(
    r"\s*(?P<metric>[a-z_]+(?:\.[a-z0-9]+)?)\s*(?P<sign><=|>=)\s*"
    r"(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(?P<unit>[A-Za-z%]*)\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A bound on one figure of a result."""

    text: str
    """The objective as written."""
    metric: str
    at_most: bool
    """Whether `bound` is an upper bound; otherwise a lower one."""
    bound: float
    """In seconds, fractions or plain numbers."""
    unit: Unit

    @property
    def is_budget(self) -> bool:
        """Whether more nodes cannot help to meet it."""
        return self.metric in _BUDGETS

    def value(self, result: SimResult) -> float:
        """The figure in a result."""
        if self.metric in _SCALARS:
            return _SCALARS[self.metric][1](result)
        quantity, _, statistic = self.metric.partition(".")
        distribution = getattr(result, quantity)
        assert isinstance(distribution, DistributionSummary)
        found = getattr(distribution, _STATISTICS[statistic])
        assert isinstance(found, int | float)
        return float(found)

    def is_met(self, result: SimResult) -> bool:
        """Whether the result meets it; NaN does not."""
        value = self.value(result)
        return value <= self.bound if self.at_most else value >= self.bound


NO_FAILED_JOBS = Objective(
    text="failed_jobs<=0", metric="failed_jobs", at_most=True, bound=0.0, unit="count"
)
"""Default bound: failed jobs would make all waits short."""


def objectives(given: Sequence[str]) -> tuple[Objective, ...]:
    """Parse the values of `--slo`; `NO_FAILED_JOBS` is added unless another bound is given.

    Raises:
        InvalidRequestError: an objective is invalid.
    """
    found = tuple(
        objective(part)
        for each in given
        for part in each.split(",")
        if part.strip() or not each.strip()
    )
    named = {each.metric for each in found}
    return found if "failed_jobs" in named else (*found, NO_FAILED_JOBS)


def objective(text: str) -> Objective:
    """Parse one objective.

    Raises:
        InvalidRequestError: the objective is invalid.
    """
    parts = _FORM.fullmatch(text)
    if parts is None:
        raise InvalidRequestError(
            f"objective {text!r}: write METRIC<=VALUE or METRIC>=VALUE, as wait.p95<=2h, "
            "job_slowdown.median<=5% or drain<=30d"
        )
    metric = parts["metric"]
    unit = _unit(text, metric)
    scales = SCALES[unit]
    if parts["unit"] not in scales:
        raise InvalidRequestError(
            f"objective {text!r}: {metric} is {_UNIT_TEXTS[unit]}, not "
            f"{parts['number'] + parts['unit']!r}"
        )
    return Objective(
        text=text.strip(),
        metric=metric,
        at_most=parts["sign"] == "<=",
        bound=float(parts["number"]) * scales[parts["unit"]],
        unit=unit,
    )


def _unit(text: str, metric: str) -> Unit:
    if metric in _SCALARS:
        return _SCALARS[metric][0]
    quantity, dot, statistic = metric.partition(".")
    if quantity in _QUANTITIES and statistic in _STATISTICS:
        return _QUANTITIES[quantity]
    if quantity in _QUANTITIES:
        wrong = f"no statistic {statistic!r}" if dot else "a statistic missing"
        raise InvalidRequestError(
            f"objective {text!r} has {wrong}: write {quantity}.STATISTIC with one of "
            f"{', '.join(_STATISTICS)}"
        )
    raise InvalidRequestError(
        f"objective {text!r}: unknown figure {metric!r}; use "
        f"{', '.join(f'{name}.STATISTIC' for name in _QUANTITIES)}, {', '.join(_SCALARS)}"
    )
