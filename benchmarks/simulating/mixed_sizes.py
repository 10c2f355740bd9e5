"""What sharing across sizes saves where few jobs have the same size.

    python -m benchmarks.simulating.mixed_sizes [--quick] [--json]

Jobs have 8 to 384 training GPUs. How many have which size follows from the GPU-hours by size of
Acme's Seren cluster (Hu et al., NSDI 2024; read from the curve of GPU time that its repository
publishes, because Philly has no job beyond 128 GPUs), with Philly's durations. Cycles are published
(PlexRL Tab. 1): 7B up to 16 GPUs, 30B up to 128, else 235B, with as many rollout GPUs relative to
the training as there. All jobs wait at the start for 800 GPUs; the longest goes first; switches
take 8 s; one in 128 cycles is run.

*equal sizes*: a deployment shares with those of its own size only (`mixed_sizes` off). *mixed
sizes*: a smaller one joins a part of a larger one's group, and with shared rollouts a training lies
on its own rollouts' GPUs and others. *drain*: relative to `isolated+backfill` in the same order.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.report import Part, report
from benchmarks.simulating.cluster import (
    ALONE,
    SHARED,
    SWITCH_S,
    by_policy,
    gpu_hours_a_step,
    ratios,
    slowdown_cells,
    with_spread,
)
from benchmarks.simulating.drain import Sample
from benchmarks.sizes import sized
from plexrl.sim.workload.scenario import Pool, RolloutGpus, Scenario
from plexrl.traces import Shape, TraceJob, generate_jobs
from plexrl.traces.convert.shaping import shaped
from plexrl.traces.generate.distributions import Choice
from plexrl.traces.generate.published import MODEL_CLASSES
from plexrl.traces.generate.workload import (
    CAP_S,
    PHILLY_DURATIONS,
    SizeClass,
    Workload,
    published_workload,
)

SEEDS = sized((1, 2, 3), quick=(1,))
NODES = 100
JOBS = sized(1200, quick=60)
SHORTER = sized(128, quick=1)
JOB_CAP_S = sized(CAP_S, quick=3600.0)
GPU_HOURS = {8: 9.53, 16: 1.29, 32: 5.97, 64: 8.35, 96: 1.09, 128: 13.0, 192: 1.92}
GPU_HOURS |= {256: 12.68, 320: 3.01, 384: 1.35}
"""Percent of the GPU time of Seren by training GPUs; sizes between two count for the larger."""
MODELS = {16: "7B", 128: "30B", 384: "235B"}
"""Model of a job by the most GPUs that it has."""
NODE_GPUS = 8
COLUMNS = ("sharing", "drain", "slowdown median", "mean", "p95", "GPU-h a step")


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a seed."""

    seed: int

    def jobs(self) -> Iterator[TraceJob]:
        """All at the start."""
        made = generate_jobs(workload(), seed=self.seed, jobs=JOBS, cap_s=JOB_CAP_S)
        yield from shaped(made, Shape(backlog=True))


def workload() -> Workload:
    """Sizes by their share of the GPU-hours: with the same durations, a job of twice the GPUs has
    twice the hours."""
    sizes = tuple(size_class(gpus, hours / gpus) for gpus, hours in GPU_HOURS.items())
    return replace(published_workload(), sizes=sizes)


def size_class(gpus: int, weight: float) -> SizeClass:
    """The jobs of a size."""
    name = next(model for most, model in MODELS.items() if gpus <= most)
    model = MODEL_CLASSES[name]
    rollout_gpus = gpus * model.rollout_gpus / model.gpus
    return SizeClass(
        weight=weight,
        gpus=Choice(values=(float(gpus),), weights=(1.0,)),
        duration=PHILLY_DURATIONS,
        model=name,
        rollout_gpus=(
            round(rollout_gpus)
            if rollout_gpus < NODE_GPUS
            else NODE_GPUS * round(rollout_gpus / NODE_GPUS)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row."""

    policy: str = SHARED
    rollouts: RolloutGpus = "own"
    mixed_sizes: bool | None = None

    def scenario(self, seed: int) -> Scenario:
        """Its run of a seed."""
        return Scenario(
            source=Sample(source=Jobs(seed), shorter=SHORTER),
            pools=(Pool(nodes=NODES),),
            policy=self.policy,
            seed=seed,
            switch_s=SWITCH_S,
            rollouts=self.rollouts,
            longest_first=True,
            mixed_sizes=self.mixed_sizes,
        )


BASELINE = Case(policy=ALONE)
CASES = {
    "none": BASELINE,
    "equal sizes, own rollout GPUs": Case(mixed_sizes=False),
    "equal sizes, shared rollout GPUs": Case(mixed_sizes=False, rollouts="shared"),
    "mixed sizes, own rollout GPUs": Case(),
    "mixed sizes, shared rollout GPUs": Case(rollouts="shared"),
}
FIGURES = {
    "drain_ratio_equal_sizes": "equal sizes, own rollout GPUs",
    "drain_ratio_equal_sizes_shared_rollouts": "equal sizes, shared rollout GPUs",
    "drain_ratio_mixed_sizes": "mixed sizes, own rollout GPUs",
    "drain_ratio_mixed_sizes_shared_rollouts": "mixed sizes, shared rollout GPUs",
}


def measure(*, full: bool) -> Part:
    """All cases."""
    del full
    sys.stderr.write("mixed sizes: …\n")
    runs = by_policy({case: [case.scenario(seed) for seed in SEEDS] for case in CASES.values()})
    title = f"Jobs of 8 to 384 GPUs on {NODES * NODE_GPUS}, {len(SEEDS)} seeds"
    part = Part(title=title, columns=COLUMNS)
    for name, case in CASES.items():
        found = runs[case]
        drain = with_spread(ratios(found, runs[BASELINE]))
        part.rows.append((name, drain, *slowdown_cells(found), gpu_hours_a_step(found)))
    for figure, name in FIGURES.items():
        part.figures[figure] = fmean(ratios(runs[CASES[name]], runs[BASELINE]))
    return part


def main() -> None:
    """Print the table."""
    part = measure(full=False)
    report(part.title, part.columns, part.rows, part.figures)


if __name__ == "__main__":
    main()
