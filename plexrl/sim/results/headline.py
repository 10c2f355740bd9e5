"""Summarises simulated runs in one sentence each: medians and ranges over seeds. Pure.

All seeds count. A policy is called the fastest only if its slowest seed beats every seed of every
other policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from plexrl.sim.results.comparison import BASELINES, recovered
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import Scenario

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The range of a figure over seeds."""

    values: tuple[float, ...]
    """Values of all seeds, ascending."""

    @property
    def median(self) -> float:
        """Median over seeds."""
        return median(self.values)

    @property
    def has_width(self) -> bool:
        """Whether the seeds differ."""
        return self.values[0] < self.values[-1]

    @property
    def text(self) -> str:
        """The median in percent, with the range."""
        if not self.has_width:
            return f"{100 * self.values[0]:.1f} %"
        lowest, highest = 100 * self.values[0], 100 * self.values[-1]
        return f"{100 * self.median:.1f} % ({lowest:.1f} to {highest:.1f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One policy on one cluster, compared with runs of equal seeds without sharing."""

    scenario: Scenario
    """Scenario of the first seed."""
    baseline: str
    """Policy of the baseline."""
    seeds: int
    drain: Band
    """Drain time relative to the baseline's."""
    whole: Band
    """GPU-hours of the whole cluster relative to the baseline's."""
    counts_rollouts: bool
    """Whether the runs have rollout GPUs; otherwise the drain time is sufficient."""
    places_rollouts: bool = False
    """Whether the drain time is of the whole cluster."""
    recovered: Band | None
    """Recovered part of the gap to the bound; absent if some seed has no gap or is slower."""
    is_quickest: bool = False
    """Whether it is the fastest policy on this cluster, with a range that overlaps no other."""

    @property
    def text(self) -> str:
        """The sentence."""
        text = f"{self.scenario.policy} {drained(self.drain, self.baseline)}"
        if self.places_rollouts:
            return f"{text} (whole cluster, rollouts included)."
        text = f"{text} (training GPUs only"
        if not self.counts_rollouts:
            return f"{text}: the trace has no rollout GPUs)."
        return f"{text}), with {self.whole.text} of its GPU-hours on the whole cluster."


def whole_gpu_hours(result: SimResult) -> float:
    """GPU-hours of all GPUs until the drain, and of rollout GPUs outside of the cluster."""
    outside = 0.0 if result.places_rollouts else result.rollout_gpu_hours
    return result.gpus * result.drain_s / HOUR_S + outside


def drained(drain: Band, baseline: str) -> str:
    """Text that compares a drain time with the baseline's."""
    if drain.median <= 1.0:
        return f"drains in {drain.text} of the time of {baseline}"
    longer = Band(values=tuple(value - 1.0 for value in drain.values))
    return f"drains {longer.text} longer than {baseline}"


def headlines(runs: Sequence[tuple[Scenario, SimResult]]) -> tuple[Headline, ...]:
    """A headline for each sharing policy and each cluster, in the order of the runs. The baseline
    is `isolated+backfill` if it was run, else `isolated`; without either there are no headlines."""
    known = dict(runs)
    groups: dict[Scenario, list[tuple[Scenario, SimResult]]] = {}
    for scenario, result in runs:
        groups.setdefault(replace(scenario, seed=0), []).append((scenario, result))
    found = []
    for group in groups.values():
        first = group[0][0]
        baseline = _baseline(group, known)
        if first.policy not in BASELINES and baseline is not None:
            found.append(_headline(group, baseline, known))
    return tuple(replace(each, is_quickest=_is_quickest(each, found)) for each in found)


def sentences(lines: Sequence[Headline], clusters_named: Sequence[str] = ()) -> list[str]:
    """The sentences: each headline, and whether one policy is the fastest. With several clusters,
    `clusters_named` has the name of each line's cluster."""
    names = [f"{name}: " for name in clusters_named] or [""] * len(lines)
    found = [f"{name}{each.text}" for name, each in zip(names, lines, strict=True)]
    alike = bool(lines) and lines[0].seeds > 1 and not any(line.drain.has_width for line in lines)
    if len(lines) < 2 and not alike:
        return found
    quickest = [line.scenario.policy for line in lines if line.is_quickest]
    clusters = {replace(line.scenario, policy="", seed=0) for line in lines}
    if len(clusters) > 1:
        return found
    if alike:
        found.append("All seeds are alike, as where nothing is drawn (--jitter): no band, no best.")
    elif quickest:
        found.append(f"{quickest[0]} drains first in every seed: its band overlaps no other's.")
    elif lines[0].seeds > 1:
        found.append("The bands of the quickest policies overlap: none is called best.")
    else:
        found.append(
            "One seed has no band, so no policy is called best: --sweep seed=0:4 gives one."
        )
    return found


def _headline(
    group: Sequence[tuple[Scenario, SimResult]],
    baseline: str,
    known: dict[Scenario, SimResult],
) -> Headline:
    drains, wholes, parts = [], [], []
    for scenario, result in group:
        alone = known[replace(scenario, policy=baseline)]
        drains.append(result.drain_s / alone.drain_s if alone.drain_s > 0 else 1.0)
        whole = whole_gpu_hours(alone)
        wholes.append(whole_gpu_hours(result) / whole if whole > 0 else 1.0)
        parts.append(recovered(result, alone))
    known_parts = [part for part in parts if part is not None]
    return Headline(
        scenario=group[0][0],
        baseline=baseline,
        seeds=len(group),
        drain=Band(values=tuple(sorted(drains))),
        whole=Band(values=tuple(sorted(wholes))),
        counts_rollouts=any(result.rollout_gpu_hours > 0 for _, result in group),
        places_rollouts=all(result.places_rollouts for _, result in group),
        recovered=(
            Band(values=tuple(sorted(known_parts))) if len(known_parts) == len(parts) else None
        ),
    )


def _baseline(
    group: Sequence[tuple[Scenario, SimResult]], known: dict[Scenario, SimResult]
) -> str | None:
    for name in BASELINES:
        if all(replace(scenario, policy=name) in known for scenario, _ in group):
            return name
    return None


def _is_quickest(one: Headline, all_of_them: Sequence[Headline]) -> bool:
    others = [
        each
        for each in all_of_them
        if each is not one
        and replace(each.scenario, policy="", seed=0) == replace(one.scenario, policy="", seed=0)
    ]
    return (
        bool(others)
        and any(each.drain.has_width for each in (one, *others))
        and all(one.drain.values[-1] < other.drain.values[0] for other in others)
    )
