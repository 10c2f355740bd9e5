"""The distributions of a workload, fitted to a trace or from the published profiles.

The model: gaps between arrivals are independent on the clock of `Rhythm`; GPU counts follow the
trace's counts; durations depend on the size class only; tenants are independent. It does not model
bursts of one tenant, sequences of similar jobs, or trends over months.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.traces.generate.daily_rate import Rhythm, rhythm_of
from plexrl.traces.generate.distributions import Choice, Distribution, Exponential, Quantiles
from plexrl.traces.generate.fitting import Fit, fit
from plexrl.traces.generate.published import MODEL_CLASSES
from plexrl.traces.schema import TraceJob

SIZE_EDGES = (1, 2, 4, 8, 9, 17, 33, 65, 129)
"""Lower edges of size classes in GPUs; each class has its own distribution of durations."""
CLASS_JOBS_MIN = 200
"""Smaller classes are merged with the class below."""
TENANTS_MAX = 1000
"""Most tenants that keep their names; the rest become one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClass:
    """Jobs of similar size."""

    weight: float
    """Share of all jobs."""
    gpus: Choice
    duration: Distribution
    model: str = ""
    """RL profile of its jobs; empty: by their GPUs."""
    rollout_gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The distributions of a workload."""

    gap: Distribution
    """Gap between arrivals, in seconds of the rhythm's clock."""
    rhythm: Rhythm
    sizes: tuple[SizeClass, ...]
    tenants: tuple[tuple[str, float], ...]
    """Names and weights."""
    fits: dict[str, Fit] = field(default_factory=dict)
    """Fits by name."""

    def describe(self) -> list[tuple[str, str, float | None]]:
        """Name, distribution and Kolmogorov distance of each quantity; None if not fitted."""
        distributions = [("gaps", self.gap)]
        distributions += [(_class_name(size), size.duration) for size in self.sizes]
        fits = self.fits
        return [
            (name, distribution.describe(), fits[name].distance if name in fits else None)
            for name, distribution in distributions
        ]


PHILLY_DURATIONS = Quantiles(
    parts=(0.0, 0.01, *(index / 20 for index in range(1, 20)), 0.98, 0.99, 0.995, 0.999, 1.0),
    values=(
        *(9.0, 35.0, 83.0, 195.0, 347.0, 568.0, 1256.0, 3621.0, 7521.0, 12652.0, 19814.0),
        *(28766.0, 50162.0, 70400.0, 108449.0, 145587.0, 174409.0, 203939.0, 244899.0),
        *(363100.0, 535591.0, 829116.0, 1111274.0, 1997267.0, 2656433.0, 4628226.0),
    ),
)
"""Durations of Philly's 1 656 jobs of 8 GPUs and more, with Kolmogorov distance 0.016 (lognormal
0.12, Weibull 0.09); no public trace has durations of RL jobs."""

CAP_S = 14 * 86_400.0
"""Longest generated duration: a job of months would dominate the results of a policy."""


def published_workload(jobs_per_day: float = 12.0) -> Workload:
    """Jobs of the three published classes in equal numbers, on their published GPUs, with Poisson
    arrivals and Philly's durations."""
    sizes = tuple(
        SizeClass(
            weight=1.0 / len(MODEL_CLASSES),
            gpus=Choice(values=(float(each.gpus),), weights=(1.0,)),
            duration=PHILLY_DURATIONS,
            model=each.name,
            rollout_gpus=each.rollout_gpus,
        )
        for each in MODEL_CLASSES.values()
    )
    return Workload(
        gap=Exponential(mean=86_400.0 / jobs_per_day),
        rhythm=Rhythm(),
        sizes=sizes,
        tenants=tuple((f"tenant{index}", 1.0 / (index + 1)) for index in range(8)),
    )


def fit_workload(jobs: Iterable[TraceJob]) -> Workload:
    """Fit a workload to a trace. Keeps three numbers per job in memory.

    Raises:
        InvalidRequestError: the trace has fewer than two jobs.
    """
    submits, durations, sizes = array("d"), array("d"), array("q")
    tenants: Counter[str] = Counter()
    for job in jobs:
        submits.append(job.submit_s)
        durations.append(job.service_s)
        sizes.append(job.gpus)
        tenants[job.tenant] += 1
    if len(submits) < 2:
        raise InvalidRequestError("fitting needs at least two jobs: this trace has fewer")
    times = np.frombuffer(submits)
    span_s = float(times[-1] - times[0])
    rhythm = rhythm_of(submits, span_s)
    clocks = np.array([rhythm.clock(time_s) for time_s in submits])
    fits = {"gaps": fit(np.maximum(np.diff(clocks), 0.0))}
    classes = _classes(np.frombuffer(durations), np.frombuffer(sizes, dtype=np.int64), fits)
    return Workload(
        gap=fits["gaps"].distribution,
        rhythm=rhythm,
        sizes=classes,
        tenants=_tenants(tenants),
        fits=fits,
    )


def _classes(
    durations: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    sizes: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    fits: dict[str, Fit],
) -> tuple[SizeClass, ...]:
    by_edge: dict[int, list[int]] = {}
    edges = np.searchsorted(np.array(SIZE_EDGES), sizes, side="right")
    for edge in sorted(set(edges.tolist())):
        by_edge[edge] = np.flatnonzero(edges == edge).tolist()
    merged: list[list[int]] = []
    for members in by_edge.values():
        if merged and (len(members) < CLASS_JOBS_MIN or len(merged[-1]) < CLASS_JOBS_MIN):
            merged[-1] += members
        else:
            merged.append(members)
    found = []
    for members in merged:
        counts = Counter(sizes[members].tolist())
        fitted = fit(durations[members])
        chosen = SizeClass(
            weight=len(members) / len(sizes),
            gpus=Choice(
                values=tuple(float(gpus) for gpus in sorted(counts)),
                weights=tuple(float(counts[gpus]) for gpus in sorted(counts)),
            ),
            duration=fitted.distribution,
        )
        fits[_class_name(chosen)] = fitted
        found.append(chosen)
    return tuple(found)


def _class_name(size: SizeClass) -> str:
    low, high = size.gpus.values[0], size.gpus.values[-1]
    gpus = f"{low:.0f}" if low == high else f"{low:.0f}-{high:.0f}"
    return f"durations, {size.model + ' on ' if size.model else ''}{gpus} GPUs"


def _tenants(counts: Counter[str]) -> tuple[tuple[str, float], ...]:
    ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    kept = [(name, float(count)) for name, count in ranked[:TENANTS_MAX]]
    rest = sum(count for _, count in ranked[TENANTS_MAX:])
    return tuple(kept + ([("others", float(rest))] if rest else []))
