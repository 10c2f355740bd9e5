"""Compares ordering rules: what a cycle loses to the jobs that share its node group.

    python benchmarks/ordering.py [--quick] [--json]

The scheduler's own core runs on a virtual clock. Jobs have the published 7B, 30B and 235B profiles
(`mix`: 7B, 30B, 235B and a second 7B on one group) with lognormal rollouts and batches (sigma 0.15)
and staggered starts; one seed gives every rule the same cycles. Slowdown is the duration of a cycle
divided by its duration alone, minus 1. One run of this command measures all rows, rules and seeds.
`±` is the standard error over seeds of the difference to the best other rule; `yes?` marks a lead
of less than two standard errors. The other rules are as published. `hrrs` is PlexRL's rule with all
its parts; the second table shows what each part contributes.
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.report import report
from benchmarks.simulating.shared_group import SharedGroup
from benchmarks.sizes import sized
from plexrl.traces import MODEL_CLASSES

SIGMA = 0.15
MIX = ("7B", "30B", "235B", "7B")
RESIDENTS = sized((3, 4), quick=(3,))
SWITCHES_S = sized((8.0, 2.0), quick=(8.0,))
SEEDS = sized(tuple(range(1, 9)), quick=(1, 2))
CYCLES = sized(300, quick=3)
"""Counted cycles of each job and seed, after the warm-up."""
WARM_UP = sized(5, quick=1)

Row = tuple[str, int, float]
"""Profile, residents, seconds of a switch."""

RIVALS = {
    "literal": "hrrs-operations",
    "fifo-op": "fifo-operations",
    "fifo": "fifo-bursts",
    "lrs": "least-recently-served",
    "rr": "round-robin",
}
PARTS = {
    "hrrs": ("hrrs", True),
    "hrrs, no anticipation": ("hrrs", False),
    "fifo + anticipation": ("fifo-bursts", True),
    "lrs + anticipation": ("least-recently-served", True),
}
"""Columns of the second table: (ordering, anticipation)."""

Task = tuple[Row, str, bool | None, int]


def slowdowns(task: Task) -> list[float]:
    """Slowdowns of the counted cycles of one run."""
    (profile_name, residents, switch_s), ordering, anticipation, seed = task
    names = MIX[:residents] if profile_name == "mix" else (profile_name,) * residents
    settings = {"ordering": ordering, "anticipation": anticipation}
    group = SharedGroup(
        names, settings=settings, cycles=WARM_UP + CYCLES, sigma=SIGMA, switch_s=switch_s, seed=seed
    )
    group.run(WARM_UP + CYCLES)
    return [
        cycle.slowdown
        for cycles in group.cycles.values()
        for cycle in cycles[WARM_UP : WARM_UP + CYCLES]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Mean and 95th percentile (nearest rank) of a run's slowdowns."""

    mean: float
    p95: float


def summarise(slowdowns: Sequence[float]) -> Summary:
    """The summary of these slowdowns."""
    ordered = sorted(slowdowns)
    return Summary(
        mean=fmean(ordered), p95=ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    )


def measure(rows: Sequence[Row]) -> dict[tuple[Row, str, bool | None], list[Summary]]:
    """One summary a seed, by (row, ordering, anticipation)."""
    kinds: dict[tuple[str, bool | None], None] = {("hrrs", None): None}
    kinds.update({(ordering, None): None for ordering in RIVALS.values()})
    # `hrrs` has anticipation by default, so this combination is not run twice.
    kinds.update({kind: None for kind in PARTS.values() if kind != ("hrrs", True)})
    tasks = [(row, *kind, seed) for row in rows for kind in kinds for seed in SEEDS]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(slowdowns, tasks, chunksize=4))
    found: dict[tuple[Row, str, bool | None], list[Summary]] = {}
    for (row, ordering, anticipation, _), result in zip(tasks, results, strict=True):
        found.setdefault((row, ordering, anticipation), []).append(summarise(result))
    for row in rows:
        found[row, "hrrs", True] = found[row, "hrrs", None]
    return found


def verdict(own: Sequence[float], others: dict[str, Sequence[float]]) -> tuple[bool, bool, str]:
    """Whether the mean of `own` is lower than all others, whether the lead exceeds two standard
    errors, and a text with the lead over the best of them."""
    best = min(others, key=lambda name: fmean(others[name]))
    differences = [100 * (theirs - ours) for ours, theirs in zip(own, others[best], strict=True)]
    margin, error = fmean(differences), stdev(differences) / len(differences) ** 0.5
    is_lowest, is_clear = margin > 0, margin > 2 * error
    answer = "yes" if is_clear else "yes?" if is_lowest else "NO"
    return is_lowest, is_clear, f"{answer} {best} {margin:+.1f}±{error:.1f}"


def shown(summaries: Sequence[Summary]) -> str:
    """Mean and 95th percentile in percent, averaged over seeds."""
    mean, p95 = fmean(s.mean for s in summaries), fmean(s.p95 for s in summaries)
    return f"{100 * mean:.1f}/{100 * p95:.0f}"


def main() -> None:
    """Measure all rows and say where `hrrs` is lowest."""
    rows = [
        (name, residents, switch_s)
        for name in (*MODEL_CLASSES, "mix")
        for residents in RESIDENTS
        for switch_s in SWITCHES_S
    ]
    found = measure(rows)
    figures: dict[str, float] = {}
    table, parts = [], []
    lowest, clearly = {"mean": 0, "p95": 0}, {"mean": 0, "p95": 0}
    for row in rows:
        label = f"{row[0]} x{row[1]} {row[2]:.0f}s"
        key = f"{row[0]}_r{row[1]}_switch{row[2]:.0f}"
        own = found[row, "hrrs", None]
        others = {name: found[row, ordering, None] for name, ordering in RIVALS.items()}
        for name, summaries in {"hrrs": own, **others}.items():
            figures[f"{key}_{name}_mean"] = fmean(s.mean for s in summaries)
            figures[f"{key}_{name}_p95"] = fmean(s.p95 for s in summaries)
        verdicts = []
        for part in ("mean", "p95"):
            is_lowest, is_clear, words = verdict(
                [getattr(s, part) for s in own],
                {name: [getattr(s, part) for s in theirs] for name, theirs in others.items()},
            )
            figures[f"{key}_hrrs_lowest_{part}"] = is_lowest
            lowest[part] += is_lowest
            clearly[part] += is_clear
            verdicts.append(words)
        table.append((label, shown(own), *map(shown, others.values()), *verdicts))
        for name, kind in PARTS.items():
            figures[f"{key}_{name}_mean"] = fmean(s.mean for s in found[row, *kind])
            figures[f"{key}_{name}_p95"] = fmean(s.p95 for s in found[row, *kind])
        parts.append((label, *(shown(found[row, *kind]) for kind in PARTS.values())))
    report(
        "Slowdown of a cycle by ordering rule, mean/p95 in %: hrrs is lowest in mean in "
        f"{lowest['mean']} of {len(rows)} rows, beyond two standard errors in {clearly['mean']}; "
        f"in p95 in {lowest['p95']}, beyond two standard errors in {clearly['p95']}",
        ("row", "hrrs", *RIVALS, "hrrs lowest mean?", "lowest p95?"),
        table,
        figures,
    )
    if "--json" not in sys.argv:
        report("What the parts bring, mean/p95 in %", ("row", *PARTS), parts, figures)


if __name__ == "__main__":
    main()
