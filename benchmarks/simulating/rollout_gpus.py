"""What sharing the GPUs of rollouts saves on the whole cluster.

    python -m benchmarks.simulating.rollout_gpus [--quick] [--json]

The jobs, the cluster and the baseline are those of `benchmarks/simulating/cluster.py`, with an
eighth of the cycles; switches take 8 s where nothing else is said. Rows are `spread+backfill` with
rollouts

* on their `own` GPUs;
* `shared`, as a live deployment with `shares_gpus`: a training lies on its own rollouts' GPUs and
  on others, in the gaps of other trainings;
* `automatic`, as a live deployment without it: the scheduler decides, which shares them while
  others wait for GPUs.

*R < T*: with the GPUs of PlexRL Tab. 1, as far as it has them (`plexrl.traces.generate.published`).
*R = T*: rollouts have as many GPUs as the training, so that a rollout can have the group of its own
training. *as long*: a rollout takes as long as before, as if only the slowest sample counted; *half
as well*, *as well*: half of its time, or all, scales with its GPUs. The last is a bound: it needs
that no sample is much longer than others.

*of R < T*: drain relative to `isolated+backfill`, in the same order, with the GPUs of Tab. 1; *of
the same*: relative to `isolated+backfill` with the GPUs and times of the row. *floor*: bound of the
drain by work and critical path, relative to the first.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.report import Part, report
from benchmarks.simulating.cluster import (
    ALONE,
    SHARED,
    by_policy,
    gpu_hours_a_step,
    ratios,
    slowdown_cells,
    whole,
    with_spread,
)
from benchmarks.simulating.drain import Sample
from benchmarks.sizes import sized
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import JobSource, RolloutGpus, Scenario
from plexrl.traces import TraceJob
from plexrl.traces.generate.published import JITTER

SEEDS = sized((1, 2, 3), quick=(1,))
SHORTER = sized(128, quick=1)
SCALES = {"as long": 0.0, "half as well": 0.5, "as well": 1.0}
"""Part of a rollout's time that scales with its GPUs."""
COLUMNS = (
    *("rollouts", "of R < T", "of the same", "floor", "slowdown median", "mean", "p95"),
    "GPU-h a step",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsOnAll:
    """The same jobs, with as many GPUs for rollouts as for training."""

    source: JobSource
    scaling: float
    """Part of a rollout's time that scales with its GPUs."""

    def jobs(self) -> Iterator[TraceJob]:
        """In their order."""
        for job in self.source.jobs():
            assert job.period_s is not None, f"{job.job_id} has no period"
            assert job.cycles is not None, f"{job.job_id} has no cycles"
            rollout_s = job.segments[0].offset_s
            saved_s = self.scaling * rollout_s * (1.0 - job.rollout_gpus / job.gpus)
            period_s = job.period_s - saved_s
            yield replace(
                job,
                rollout_gpus=job.gpus,
                period_s=period_s,
                jitter_s=JITTER * period_s,
                duration_s=job.cycles * period_s,
                segments=tuple(
                    replace(each, offset_s=each.offset_s - saved_s) for each in job.segments
                ),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row."""

    rollouts: RolloutGpus
    policy: str = SHARED
    switch_s: float = 8.0
    staleness: int = 0
    scaling: float | None = None
    """Of R = T; absent: R < T."""
    longest_first: bool = False

    def scenario(self, seed: int) -> Scenario:
        """Its run of a seed."""
        found = whole(self.policy, seed, self.staleness)
        assert isinstance(found.source, Sample), "the jobs are a sample"
        found = replace(
            found,
            source=replace(found.source, shorter=SHORTER),
            rollouts=self.rollouts,
            switch_s=self.switch_s,
            longest_first=self.longest_first,
        )
        if self.scaling is None:
            return found
        return replace(found, source=RolloutsOnAll(source=found.source, scaling=self.scaling))

    def alone(self) -> "Case":
        """The same jobs in the same order without sharing."""
        return replace(self, rollouts="own", policy=ALONE, switch_s=8.0)

    def alone_on_fewest(self) -> "Case":
        """As `alone`, with the GPUs of PlexRL Tab. 1."""
        return replace(self.alone(), scaling=None)


CASES = {
    "own": Case(rollouts="own"),
    "shared": Case(rollouts="shared"),
    "automatic": Case(rollouts="automatic"),
    "automatic, longest first": Case(rollouts="automatic", longest_first=True),
    "shared, switch of 2 s": Case(rollouts="shared", switch_s=2.0),
    "shared, longest first": Case(rollouts="shared", longest_first=True),
    "shared, longest first, switch of 2 s": Case(
        rollouts="shared", switch_s=2.0, longest_first=True
    ),
    "R = T, own": Case(rollouts="own", scaling=0.0),
    **{
        f"R = T, {name}, shared": Case(rollouts="shared", scaling=scaling)
        for name, scaling in SCALES.items()
    },
    "R = T, as well, shared, switch of 2 s": Case(rollouts="shared", switch_s=2.0, scaling=1.0),
    "stale, own": Case(rollouts="own", staleness=1),
    "stale, shared": Case(rollouts="shared", staleness=1),
    "stale, automatic": Case(rollouts="automatic", staleness=1),
}
FIGURES = {
    "shared_rollouts": "shared",
    "automatic_rollouts": "automatic",
    "shared_rollouts_stale": "stale, shared",
    "shared_rollouts_2s": "shared, switch of 2 s",
    "longest_first": "shared, longest first",
    "longest_first_2s": "shared, longest first, switch of 2 s",
    "shared_rollouts_scaled": "R = T, as well, shared",
}
"""Of each figure the case."""


def measure(*, full: bool) -> Part:
    """All cases."""
    del full
    sys.stderr.write("rollout GPUs: …\n")
    baselines = {
        found for case in CASES.values() for found in (case.alone(), case.alone_on_fewest())
    }
    runs = by_policy(
        {case: [case.scenario(seed) for seed in SEEDS] for case in {*CASES.values(), *baselines}}
    )
    part = Part(title=f"Shared GPUs of rollouts, {len(SEEDS)} seeds", columns=COLUMNS)
    part.rows.extend(_row(name, case, runs) for name, case in CASES.items())
    for figure, name in FIGURES.items():
        case = CASES[name]
        first = runs[case.alone_on_fewest()]
        part.figures[f"drain_ratio_cluster_{figure}"] = fmean(ratios(runs[case], first))
        slowdowns = [each.cycle_slowdown for each in runs[case]]
        part.figures[f"median_slowdown_{figure}"] = fmean(each.median for each in slowdowns)
        part.figures[f"mean_slowdown_{figure}"] = fmean(each.mean for each in slowdowns)
        part.figures[f"p95_slowdown_{figure}"] = fmean(each.p95 for each in slowdowns)
    return part


def _row(name: str, case: Case, runs: Mapping[Case, Sequence[SimResult]]) -> tuple[str, ...]:
    found = runs[case]
    first = runs[case.alone_on_fewest()]
    floors = [each.bounds.bound_s / alone.drain_s for each, alone in zip(found, first, strict=True)]
    return (
        name,
        with_spread(ratios(found, first)),
        with_spread(ratios(found, runs[case.alone()])),
        f"{100 * fmean(floors):.1f} %",
        *slowdown_cells(found),
        gpu_hours_a_step(found),
    )


def main() -> None:
    """Print the table."""
    part = measure(full=False)
    report(part.title, part.columns, part.rows, part.figures)


if __name__ == "__main__":
    main()
