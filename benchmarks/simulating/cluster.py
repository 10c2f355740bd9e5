"""Compares policies on a whole cluster of 3 200 GPUs, on which rollouts run, too.

    python -m benchmarks.simulating.cluster [--quick] [--json]

The jobs are 90 days of the published 7B, 30B and 235B jobs (12 a day, with the published GPUs and
Philly's durations up to 14 days, of which one in 64 cycles is run), all waiting at the start; a
switch takes 8 s, half each way, and cycles have 15 % jitter. `sync` is synchronous training,
`stale` one step of staleness, as in PlexRL §6.3. Rollouts are deployments that the scheduler places
beside the training, so a policy that runs more jobs at once finds GPUs for their rollouts, too.

The baseline is `isolated+backfill`: the quickest without sharing, also of those that know how long
each job takes (`easy`, `conservative`). All policies switch ahead of time. *drain*: until the last
job has ended, relative to the baseline. *training pool*: the same if rollouts run outside of the
cluster, and only 2 048 training GPUs are counted. *GPU-h a step*: GPUs of groups, as held.
*slowdown*: of cycles, relative to the same cycles alone. Means over the seeds with their standard
deviation. The last rows vary one thing each: switches of 2 and 19 s, jobs that declare no demand,
and rollouts of other sizes, since PlexRL Tab. 1 does not have them
(`plexrl.traces.generate.published` infers them from the published savings).

A run takes 5 to 9 s of a processor, and there are 138, or 26 for `pareto.py`.

PlexRL §6.3 has 56 % of the time and GPUs of `isolated` for its mix, and 31, 30 and 38 % fewer
GPU-hours for two jobs on one group (`benchmarks/simulating/packing.py`).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TypeVar

from benchmarks.report import Part, report
from benchmarks.simulating.drain import CAP_S, SPAN_S, Sample
from benchmarks.sizes import sized
from plexrl.sim.results.result import SimResult
from plexrl.sim.search.one_run import FailedRun
from plexrl.sim.search.sweep import run_all
from plexrl.sim.workload.scenario import Behaviour, JobSource, Pool, Scenario
from plexrl.sim.workload.source.trace_source import PublishedSource
from plexrl.traces import Shape, TraceJob

SEEDS = sized((1, 2, 3), quick=(1,))
NODES, TRAINING_NODES = sized((400, 256), quick=(100, 64))
SHORTER = sized(64, quick=1)
SWITCH_S = 8.0
ALONE = "isolated+backfill"
SHARED = "spread+backfill"
POLICIES = sized(
    (
        *("isolated", "easy", "conservative", ALONE, "pack", SHARED),
        *("rollmux", "fifo-lock", "least-recently-served"),
    ),
    quick=("easy", ALONE, SHARED),
)
COLUMNS = (
    *("policy", "drain", "training pool", "slowdown mean", "p95", "GPU-h a step", "worst tenant"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGpus:
    """The same jobs with a part of their training GPUs for rollouts, in place of their own."""

    source: JobSource
    part: float

    def jobs(self) -> Iterator[TraceJob]:
        """In their order."""
        for job in self.source.jobs():
            yield replace(job, rollout_gpus=max(1, round(self.part * job.gpus)))


Runs = Sequence[SimResult]
"""Of one policy, by seed."""


def whole(policy: str, seed: int, staleness: int) -> Scenario:
    """The whole cluster."""
    shape = Shape(backlog=True, cap_s=CAP_S)
    source = PublishedSource(span_s=SPAN_S, jobs_per_day=12.0, shape=shape, seed=seed)
    return Scenario(
        source=Sample(source=source, shorter=SHORTER),
        pools=(Pool(nodes=NODES),),
        policy=policy,
        seed=seed,
        behaviour=Behaviour(staleness=staleness),
        switch_s=SWITCH_S,
        rollouts="own",
    )


def training_pool(scenario: Scenario) -> Scenario:
    """The same with training GPUs only, and rollouts outside."""
    return replace(scenario, rollouts="outside", pools=(Pool(nodes=TRAINING_NODES),))


def results(scenarios: Sequence[Scenario]) -> list[SimResult]:
    """Of each.

    Raises:
        PlexRLError: a run came to no result.
    """
    found = []
    for outcome in run_all(scenarios):
        if isinstance(outcome, FailedRun):
            raise outcome.error
        found.append(outcome)
    return found


KeyT = TypeVar("KeyT")


def by_policy(scenarios: Mapping[KeyT, Sequence[Scenario]]) -> dict[KeyT, Runs]:
    """The runs of each key."""
    flat = iter(results([each for group in scenarios.values() for each in group]))
    return {name: [next(flat) for _ in group] for name, group in scenarios.items()}


def ratios(runs: Runs, baseline: Runs) -> list[float]:
    """Drain times relative to the baseline's of the same seeds."""
    return [run.drain_s / alone.drain_s for run, alone in zip(runs, baseline, strict=True)]


def with_spread(values: Sequence[float], scale: float = 100.0, unit: str = " %") -> str:
    """Their mean and standard deviation."""
    spread = f" ±{scale * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{scale * fmean(values):.1f}{spread}{unit}"


def gpu_hours_a_step(runs: Runs) -> str:
    """GPU-hours of training and rollouts for each step, as held; the mean of the runs."""
    hours = [
        (each.training_gpu_hours + each.rollout_gpu_hours) / max(1, each.cycles) for each in runs
    ]
    return f"{fmean(hours):.2f}"


def slowdown_cells(runs: Runs) -> tuple[str, ...]:
    """Median, mean and p95 of the slowdown of cycles, each with its spread over the runs."""
    slowdowns = [each.cycle_slowdown for each in runs]
    return tuple(
        with_spread([getattr(each, by) for each in slowdowns]) for by in ("median", "mean", "p95")
    )


def row(name: str, runs: Runs, baseline: Runs, pool: tuple[Runs, Runs] | None) -> tuple[str, ...]:
    """A row of the table."""
    return (
        name,
        with_spread(ratios(runs, baseline)),
        "" if pool is None else with_spread(ratios(*pool)),
        with_spread([each.cycle_slowdown.mean for each in runs]),
        with_spread([each.cycle_slowdown.p95 for each in runs]),
        gpu_hours_a_step(runs),
        f"{fmean(each.worst_tenant for each in runs):.2f}",
    )


def variants(scenario: Scenario) -> dict[str, Scenario]:
    """The scenario with one thing changed, by name."""
    return {
        "switch of 2 s": replace(scenario, switch_s=2.0),
        "switch of 19 s": replace(scenario, switch_s=19.0),
        "cold start": replace(scenario, warm=False),
        **{
            f"R = {part:g} T": replace(
                scenario, source=RolloutGpus(source=scenario.source, part=part)
            )
            for part in (0.25, 1.0)
        },
    }


def measure(*, full: bool) -> Part:
    """Synchronous and stale training under every policy."""
    del full
    part = Part(title=f"Whole cluster of {NODES * 8} GPUs, {len(SEEDS)} seeds", columns=COLUMNS)
    for name, staleness in (("sync", 0), ("stale", 1)):
        sys.stderr.write(f"cluster: {name} …\n")
        scenarios = {p: [whole(p, seed, staleness) for seed in SEEDS] for p in POLICIES}
        runs = by_policy(scenarios)
        pools = by_policy({p: [training_pool(e) for e in s] for p, s in scenarios.items()})
        part.rows.append((name, *[""] * (len(COLUMNS) - 1)))
        part.rows.extend(row(p, runs[p], runs[ALONE], (pools[p], pools[ALONE])) for p in POLICIES)
        mark = "" if name == "sync" else "_stale"
        shared = runs[SHARED]
        part.figures[f"drain_ratio_cluster{mark}"] = fmean(ratios(shared, runs[ALONE]))
        part.figures[f"drain_ratio_training{mark}"] = fmean(ratios(pools[SHARED], pools[ALONE]))
        part.figures[f"bound_ratio_cluster{mark}"] = fmean(
            each.bounds.bound_s / alone.drain_s
            for each, alone in zip(shared, runs[ALONE], strict=True)
        )
        part.figures[f"gap_recovered{mark}"] = fmean(
            (alone.drain_s - each.drain_s) / (alone.drain_s - each.bounds.bound_s)
            for each, alone in zip(shared, runs[ALONE], strict=True)
        )
        part.figures[f"median_slowdown{mark}"] = fmean(e.cycle_slowdown.median for e in shared)
        part.figures[f"mean_slowdown{mark}"] = fmean(e.cycle_slowdown.mean for e in shared)
        part.figures[f"p95_slowdown{mark}"] = fmean(e.cycle_slowdown.p95 for e in shared)
    part.rows.extend(_variant_rows())
    return part


def _variant_rows() -> list[tuple[str, ...]]:
    names = list(variants(whole(SHARED, SEEDS[0], 0)))
    found = by_policy(
        {
            f"{policy} {name}": [variants(whole(policy, seed, 0))[name] for seed in SEEDS]
            for policy in (ALONE, SHARED)
            for name in names
        }
    )
    title = (f"{SHARED}, sync, with", *[""] * (len(COLUMNS) - 1))
    return [
        title,
        *(row(n, found[f"{SHARED} {n}"], found[f"{ALONE} {n}"], None) for n in names),
    ]


def main() -> None:
    """Print the table."""
    part = measure(full=False)
    report(part.title, part.columns, part.rows, part.figures)


if __name__ == "__main__":
    main()
