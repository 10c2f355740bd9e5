"""What a policy's drain time costs its jobs: each policy with several bounds on a group's load.

    python -m benchmarks.simulating.pareto [--quick] [--json] [--plot FILE]

The jobs and the cluster are those of `benchmarks/simulating/cluster.py`, synchronous: rollouts run
on GPUs of the cluster, too, so all policies have the same fleet. A larger bound lets more jobs
share a group: the cluster drains sooner, and cycles take longer. A policy is better where it drains
sooner at no more slowdown. `shared rollouts` is `spread+backfill` with trainings on the GPUs of
rollouts, the longest first, as `benchmarks/simulating/rollout_gpus.py` has it, relative to a
baseline in the same order; the other curves do not have that and are not compared with it.

*behind*: by how much drain (relative) and mean slowdown (in points of a cycle) both have to be
relaxed until this point is no better than the nearest one of `spread+backfill`; of the p95 in the
second column. It is 0 where a point of `spread+backfill` is no worse in either, and it needs no
points between those that were run (the additive epsilon indicator of Zitzler et al. 2003).
`front_behind_mean` and `front_behind_p95` are the largest of them. One seed. `--plot` draws the
points (matplotlib).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.report import Part, report
from benchmarks.simulating.cluster import ALONE, SHARED, by_policy, ratios, whole
from benchmarks.simulating.rollout_gpus import CASES
from benchmarks.sizes import sized
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import Scenario

LOADS = sized((0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 1.0), quick=(0.6, 1.1))
ROLLOUTS = "shared rollouts"
CURVES = sized(
    (SHARED, "pack", "rollmux", "fifo-lock", "least-recently-served", ROLLOUTS),
    quick=(SHARED, "pack", ROLLOUTS),
)
OURS = (SHARED, ROLLOUTS)
"""Curves of PlexRL's own policy, which are not compared with it."""
SEEDS = sized((1,), quick=(1,))
COLUMNS = ("policy, load", "drain", "slowdown mean", "p95", "behind, by mean", "by p95")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One policy with one bound, relative to `isolated+backfill`."""

    policy: str
    load: float
    drain: float
    mean: float
    """Mean slowdown of cycles."""
    p95: float

    def behind(self, others: Sequence["Point"], by: str) -> float:
        """The least part by which one of `others` takes longer, or has more slowdown, whichever is
        more; 0: one of them does neither."""
        excess: list[float] = [
            max(0.0, each.drain / self.drain - 1.0, getattr(each, by) - getattr(self, by))
            for each in others
        ]
        return min(excess)


def scenario(curve: str, seed: int) -> Scenario:
    """A run of a curve with the scheduler's own bound."""
    if curve == ROLLOUTS:
        return CASES["shared, longest first"].scenario(seed)
    return whole(curve, seed, 0)


def baseline(curve: str, seed: int) -> Scenario:
    """The same jobs in the same order without sharing."""
    if curve == ROLLOUTS:
        return CASES["shared, longest first"].alone().scenario(seed)
    return whole(ALONE, seed, 0)


def points(runs: Mapping[str, Sequence[SimResult]]) -> list[Point]:
    """By curve and bound."""
    return [
        Point(
            policy=policy,
            load=load,
            drain=fmean(ratios(found, runs[_alone(policy)])),
            mean=fmean(each.cycle_slowdown.mean for each in found),
            p95=fmean(each.cycle_slowdown.p95 for each in found),
        )
        for policy in CURVES
        for load in LOADS
        for found in [runs[f"{policy} {load}"]]
    ]


def measure(*, full: bool) -> Part:
    """All policies with all bounds."""
    del full
    scenarios = {
        f"{curve} {load}": [replace(scenario(curve, seed), load_max=load) for seed in SEEDS]
        for curve in CURVES
        for load in LOADS
    }
    scenarios |= {
        _alone(curve): [baseline(curve, seed) for seed in SEEDS] for curve in (SHARED, ROLLOUTS)
    }
    found = points(by_policy(scenarios))
    ours = [each for each in found if each.policy == SHARED]
    part = Part(title=f"Drain against slowdown, {len(SEEDS)} seeds", columns=COLUMNS)
    behind: dict[str, list[float]] = {"mean": [], "p95": []}
    for each in found:
        cells = []
        for by, largest in behind.items():
            if each.policy in OURS:
                cells.append("")
                continue
            value = each.behind(ours, by)
            cells.append(f"{value:.1%}")
            largest.append(value)
        name = f"{each.policy}, {each.load:g}"
        figures = (f"{each.drain:.1%}", f"{each.mean:.1%}", f"{each.p95:.1%}")
        part.rows.append((name, *figures, *cells))
    part.figures.update((f"front_behind_{by}", max(each)) for by, each in behind.items())
    if "--plot" in sys.argv:
        _draw(found, sys.argv[sys.argv.index("--plot") + 1])
    return part


def _alone(curve: str) -> str:
    return f"{ALONE}, as {ROLLOUTS}" if curve == ROLLOUTS else ALONE


def _draw(found: Sequence[Point], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for axes, by in zip(figure.subplots(1, 2), ("mean", "p95"), strict=True):
        for policy in CURVES:
            own = [each for each in found if each.policy == policy]
            axes.plot(
                [100 * getattr(each, by) for each in own],
                [100 * each.drain for each in own],
                marker="o",
                markersize=3,
                linewidth=2.0 if policy == SHARED else 1.0,
                label=policy,
            )
        axes.set(xlabel=f"{by} slowdown of cycles, %", ylabel=f"drain, % of {ALONE}")
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Print the table."""
    part = measure(full=False)
    report(part.title, part.columns, part.rows, part.figures)


if __name__ == "__main__":
    main()
