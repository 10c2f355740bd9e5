"""Compares simulated runs: names, baselines, and the selection for plots. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError
from plexrl.sim.results.result import SimResult

ISOLATED = "isolated"
BACKFILLED = "isolated+backfill"
"""The fair baseline: no GPUs stay idle ahead of large jobs."""
BASELINES = (BACKFILLED, ISOLATED)
"""Policies without sharing. The first of them that was run is the baseline of all figures."""
GAP_PART_MIN = 0.05
"""Smallest gap, as a part of the baseline's drain time, of which a recovered part is meaningful."""
DRAWN_RUNS_MAX = 10
"""Most runs of one plot; more lines would be indistinguishable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRun:
    """A result and its name in the report."""

    label: str
    result: SimResult
    ratio: float | None = None
    """Drain time relative to the baseline of the same size; absent without such a run."""
    baseline: str = ""
    """The baseline's policy; empty: there is none."""
    recovered: float | None = None
    """Recovered part of the gap between the baseline's drain time and the lower bound."""


def compare(results: Sequence[SimResult], labels: Sequence[str] = ()) -> tuple[LabelledRun, ...]:
    """The runs in the given order. Without `labels` a run has the name of its policy.

    Raises:
        InvalidRequestError: there is no result, or the number of labels differs.
    """
    if not results:
        raise InvalidRequestError("a report needs at least one result")
    if labels and len(labels) != len(results):
        raise InvalidRequestError(
            f"{len(labels)} labels for {len(results)} results: give one for each, or none"
        )
    names = _distinct([*labels] or [result.policy for result in results], results)
    return tuple(
        _beside_baseline(name, result, baseline(result, results))
        for name, result in zip(names, results, strict=True)
    )


def baseline(result: SimResult, results: Sequence[SimResult]) -> SimResult | None:
    """The baseline of the same size: `isolated+backfill`, or `isolated` without such a run. Among
    several, as with several seeds, the one of the same lower bound; absent if there is none, or if
    such runs differ."""
    for name in BASELINES:
        alike = [other for other in results if other.policy == name and other.gpus == result.gpus]
        if len(alike) > 1:
            alike = [other for other in alike if _same_bound(result, other)]
        if alike:
            return alike[0] if len({other.drain_s for other in alike}) == 1 else None
    return None


def _same_bound(one: SimResult, other: SimResult) -> bool:
    """Whether the bounds are equal except for rounding."""
    return all(
        math.isclose(mine, its, rel_tol=1e-9)
        for mine, its in (
            (one.bounds.critical_path_s, other.bounds.critical_path_s),
            (one.bounds.area_s, other.bounds.area_s),
        )
    )


def recovered(result: SimResult, unshared: SimResult) -> float | None:
    """The part of the gap between the baseline's drain time and the lower bound that `result`
    recovers; absent if the gap is too small or `result` is slower than the baseline."""
    gap = unshared.drain_s - result.bounds.bound_s
    if gap <= GAP_PART_MIN * unshared.drain_s or result.drain_s > unshared.drain_s:
        return None
    return (unshared.drain_s - result.drain_s) / gap


def sizes(runs: Sequence[LabelledRun]) -> tuple[int, ...]:
    """Cluster sizes in GPUs, ascending."""
    return tuple(sorted({run.result.gpus for run in runs}))


def drawn(runs: Sequence[LabelledRun]) -> tuple[LabelledRun, ...]:
    """The runs with single plots: those of the most frequent size (the lower median of several), at
    most `DRAWN_RUNS_MAX`, with equally many of each policy if not all fit."""
    counts = Counter(run.result.gpus for run in runs)
    most = [gpus for gpus in sorted(counts) if counts[gpus] == max(counts.values())]
    size = most[(len(most) - 1) // 2]
    of_size = tuple(run for run in runs if run.result.gpus == size)
    if len(of_size) <= DRAWN_RUNS_MAX:
        return of_size
    policies = len({run.result.policy for run in of_size})
    rounds = max(DRAWN_RUNS_MAX // policies, 1)
    return of_size[: min(rounds * policies, DRAWN_RUNS_MAX)]


def _beside_baseline(name: str, result: SimResult, unshared: SimResult | None) -> LabelledRun:
    if unshared is None:
        return LabelledRun(label=name, result=result)
    if result.policy == unshared.policy:
        return LabelledRun(label=name, result=result, ratio=1.0, baseline=unshared.policy)
    return LabelledRun(
        label=name,
        result=result,
        ratio=result.drain_s / unshared.drain_s if unshared.drain_s > 0 else None,
        baseline=unshared.policy,
        recovered=recovered(result, unshared),
    )


def _distinct(names: Sequence[str], results: Sequence[SimResult]) -> list[str]:
    """Number repeated names of runs of one size, so that each plot line is one run."""
    seen: Counter[tuple[str, int]] = Counter()
    distinct = []
    for name, result in zip(names, results, strict=True):
        seen[name, result.gpus] += 1
        count = seen[name, result.gpus]
        distinct.append(name if count == 1 else f"{name} ({count})")
    return distinct
