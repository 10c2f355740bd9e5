"""Summarises a trace in one pass and bounded memory. Pure."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NotRequired, TypedDict

from plexrl.traces.schema import ResponseLength, TraceJob

RELATIVE_ERROR = 0.01
"""Relative error of a quantile."""

NAMES_MAX = 1000
"""Most tenants and models that are counted by name."""

_GROWTH = math.log((1.0 + RELATIVE_ERROR) / (1.0 - RELATIVE_ERROR))


@dataclass(slots=True)
class ColumnSketch:
    """Quantiles of a stream, correct to 1 %, from counts in logarithmic bins."""

    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    _zeros: int = 0
    _bins: Counter[int] = field(default_factory=Counter)

    def add(self, value: float) -> None:
        """Count a value of at least 0."""
        self.count += 1
        self.total += value
        self.low, self.high = min(self.low, value), max(self.high, value)
        if value <= 1e-9:
            self._zeros += 1
        else:
            self._bins[math.floor(math.log(value) / _GROWTH)] += 1

    @property
    def mean(self) -> float:
        """Mean of all values; 0 without values."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """The `part`-quantile; 0 without values."""
        wanted = max(1, math.ceil(part * self.count))
        passed = self._zeros
        if wanted <= passed or not self.count:
            return 0.0
        for index in sorted(self._bins):
            passed += self._bins[index]
            if passed >= wanted:
                middle = math.exp((index + 0.5) * _GROWTH)
                return min(max(middle, self.low), self.high)
        return self.high

    def summary(self) -> dict[str, float]:
        """Mean, quantiles and maximum; zeros without values."""
        parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        return {
            "count": self.count,
            "mean": self.mean,
            **{name: self.quantile(part) for name, part in parts.items()},
            "max": self.high if self.count else 0.0,
        }


SIZE_CLASSES = ((1, "1 GPU"), (2, "2-7 GPUs"), (8, "8-31 GPUs"), (32, "32-127 GPUs"))
LARGEST = (128, "128 GPUs and more")


class LawRow(TypedDict):
    """A fitted distribution of one column."""

    of: str
    law: str
    distance: float | None
    """Its Kolmogorov distance from the sample; None: it has none."""


class SizeRow(TypedDict):
    """The jobs of one class of sizes."""

    size: str
    jobs: int
    gpu_hours: float


class LengthsDescription(TypedDict):
    """A table of response lengths in figures."""

    table: Literal["lengths"]
    responses: int
    grouped: int
    """Responses with a group."""
    quantities: dict[str, dict[str, float]]
    """`ColumnSketch.summary` by column."""
    group_correlation: NotRequired[float | None]
    """Fitted, as `laws`."""
    laws: NotRequired[list[LawRow]]


class JobsDescription(TypedDict):
    """A trace's jobs in figures."""

    table: Literal["jobs"]
    jobs: int
    arrivals_s: float
    """From the first submission to the last."""
    end_s: float
    gpu_hours: float
    """With rollouts."""
    tenants: int
    sizes: list[SizeRow]
    models: dict[str, int]
    """Jobs by model, of the first `NAMES_MAX` models; as `outcomes`."""
    outcomes: dict[str, int]
    quantities: dict[str, dict[str, float]]
    offered_load: NotRequired[float]
    """As `offered_load`, if the GPUs are known."""
    laws: NotRequired[list[LawRow]]
    """Fitted."""


def describe_jobs(jobs: Iterable[TraceJob]) -> JobsDescription:
    """Counts, sums and quantiles of a trace's jobs, as plain values."""
    quantities = ("gap_s", "duration_s", "gpus", "wait_s", "period_s", "duty", "state_bytes")
    sketches = {name: ColumnSketch() for name in quantities}
    tenants: Counter[str] = Counter()
    models: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    sizes: dict[str, list[float]] = {}
    count, first_s, last_s, end_s = 0, 0.0, 0.0, 0.0
    for job in jobs:
        if count:
            sketches["gap_s"].add(job.submit_s - last_s)
        else:
            first_s = job.submit_s
        count, last_s = count + 1, job.submit_s
        end_s = max(end_s, job.submit_s + job.service_s)
        sketches["duration_s"].add(job.service_s)
        sketches["gpus"].add(job.gpus + job.rollout_gpus)
        if job.wait_s is not None:
            sketches["wait_s"].add(job.wait_s)
        if job.state_bytes is not None:
            sketches["state_bytes"].add(job.state_bytes)
        if job.period_s is not None:
            sketches["period_s"].add(job.period_s)
            if job.segments:
                busy_s = sum(segment.duration_s for segment in job.segments)
                sketches["duty"].add(busy_s / job.period_s)
        for names, name in ((tenants, job.tenant), (models, job.model), (outcomes, job.outcome)):
            _count(names, name)
        row = sizes.setdefault(_size_class(job.gpus + job.rollout_gpus), [0, 0.0])
        row[0] += 1
        row[1] += job.gpu_seconds / 3600.0
    return {
        "table": "jobs",
        "jobs": count,
        "arrivals_s": last_s - first_s,
        "end_s": end_s,
        "gpu_hours": sum(hours for _, hours in sizes.values()),
        "tenants": len(tenants),
        "sizes": [
            {"size": name, "jobs": int(sizes[name][0]), "gpu_hours": sizes[name][1]}
            for _, name in (*SIZE_CLASSES, LARGEST)
            if name in sizes
        ],
        "models": dict(sorted(models.items())),
        "outcomes": dict(sorted(outcomes.items())),
        "quantities": {name: sketch.summary() for name, sketch in sketches.items() if sketch.count},
    }


def describe_lengths(lengths: Iterable[ResponseLength]) -> LengthsDescription:
    """Counts and quantiles of a table of response lengths, as plain values."""
    sketches = {"output_tokens": ColumnSketch(), "prompt_tokens": ColumnSketch()}
    count = grouped = 0
    for length in lengths:
        count += 1
        grouped += bool(length.group)
        sketches["output_tokens"].add(length.output_tokens)
        if length.prompt_tokens is not None:
            sketches["prompt_tokens"].add(length.prompt_tokens)
    return {
        "table": "lengths",
        "responses": count,
        "grouped": grouped,
        "quantities": {name: sketch.summary() for name, sketch in sketches.items() if sketch.count},
    }


def offered_load(description: JobsDescription, gpus: int) -> float:
    """GPU time that the jobs need, relative to the time of `gpus` GPUs between the first and the
    last arrival; infinity if all jobs arrive at once."""
    arrivals_s = description["arrivals_s"]
    return description["gpu_hours"] * 3600.0 / (gpus * arrivals_s) if arrivals_s else math.inf


def _count(names: Counter[str], name: str) -> None:
    if name in names or len(names) < NAMES_MAX:
        names[name] += 1


def _size_class(gpus: int) -> str:
    return next(
        (
            name
            for (_, name), (above, _) in zip(
                SIZE_CLASSES, (*SIZE_CLASSES[1:], LARGEST), strict=True
            )
            if gpus < above
        ),
        LARGEST[1],
    )
