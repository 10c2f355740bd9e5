"""Simulated runs beside each other: their names, their baselines, which of them are drawn. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError
from plexrl.sim.results.result import SimResult

BASELINE = "isolated"
BACKFILLED = "isolated+backfill"
"""The fair baseline: large jobs hold no GPUs idle."""
GAP_PART_MIN = 0.05
"""Of the isolated drain time; a smaller gap is none, and parts of it would say nothing."""
DRAWN_RUNS_MAX = 10
"""Of one plot: more lines could not be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A result and the name it has in the report."""

    label: str
    result: SimResult
    ratio: float | None = None
    """Drain time by the isolated run's of the same size; absent where there is none."""
    recovered: float | None = None
    """Part of the distance from the isolated drain time to the lower bound that is gained."""


def compare(results: Sequence[SimResult], labels: Sequence[str] = ()) -> tuple[Run, ...]:
    """The runs in the order given. Without `labels` a run is named by its policy.

    Raises:
        InvalidRequestError: there is no result, or not one label for each.
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
    """The isolated run of the same size, of several (as with several seeds) the one of the same
    lower bound; absent where there is none, or where such runs differ."""
    alike = [other for other in results if other.policy == BASELINE and other.gpus == result.gpus]
    if len(alike) > 1:
        alike = [other for other in alike if _same_bound(result, other)]
    return alike[0] if len({other.drain_s for other in alike}) == 1 else None


def _same_bound(one: SimResult, other: SimResult) -> bool:
    """But for the rounding of sums that were added in another order."""
    return all(
        math.isclose(mine, its, rel_tol=1e-9)
        for mine, its in (
            (one.bounds.critical_path_s, other.bounds.critical_path_s),
            (one.bounds.area_s, other.bounds.area_s),
        )
    )


def recovered(result: SimResult, isolated: SimResult) -> float | None:
    """What part of the gap from the isolated drain time to the lower bound `result` recovers;
    absent where there is no gap to speak of, or `result` takes longer than the isolated run."""
    gap = isolated.drain_s - result.bounds.bound_s
    if gap <= GAP_PART_MIN * isolated.drain_s or result.drain_s > isolated.drain_s:
        return None
    return (isolated.drain_s - result.drain_s) / gap


def sizes(runs: Sequence[Run]) -> tuple[int, ...]:
    """GPUs of the clusters, ascending."""
    return tuple(sorted({run.result.gpus for run in runs}))


def drawn(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs that are drawn one by one: of the size that most runs have, of several such sizes
    the (lower) middle one; at most `DRAWN_RUNS_MAX`, each policy as often where not all fit."""
    counts = Counter(run.result.gpus for run in runs)
    most = [gpus for gpus in sorted(counts) if counts[gpus] == max(counts.values())]
    size = most[(len(most) - 1) // 2]
    of_size = tuple(run for run in runs if run.result.gpus == size)
    if len(of_size) <= DRAWN_RUNS_MAX:
        return of_size
    policies = len({run.result.policy for run in of_size})
    rounds = max(DRAWN_RUNS_MAX // policies, 1)
    return of_size[: min(rounds * policies, DRAWN_RUNS_MAX)]


def _beside_baseline(name: str, result: SimResult, isolated: SimResult | None) -> Run:
    if isolated is None or result.policy == BASELINE:
        return Run(label=name, result=result, ratio=None if isolated is None else 1.0)
    return Run(
        label=name,
        result=result,
        ratio=result.drain_s / isolated.drain_s if isolated.drain_s > 0 else None,
        recovered=recovered(result, isolated),
    )


def _distinct(names: Sequence[str], results: Sequence[SimResult]) -> list[str]:
    """Names of runs of one size are numbered where they repeat: a line stands for one of them."""
    seen: Counter[tuple[str, int]] = Counter()
    distinct = []
    for name, result in zip(names, results, strict=True):
        seen[name, result.gpus] += 1
        count = seen[name, result.gpus]
        distinct.append(name if count == 1 else f"{name} ({count})")
    return distinct
