"""Compares GPU-hours per step of two jobs on one group and on two groups (PlexRL §6.2, Tab. 1).

The paper reports that two-job packing needs 31.36, 30.10 and 37.58 % fewer GPU-hours than the
asynchronous split deployment. A job has T training and R rollout GPUs; alone a step of C seconds
costs (T + R) C, and two jobs on one group cost (T / 2 + R) (1 + s) C each, if sharing slows their
steps down by s. So the saving is 1 - (1 + s) (T / 2 + R) / (T + R).

Sources:

* T is from Tab. 1: the product of DP, CP, PP and TP, which is 8, 256 and 384.
* R is not in Tab. 1, which has only the rollout's tensor-parallel size (2, 2 and 8).
  `plexrl.traces.generate.published` infers R from the published savings, so the column *saved* is
  not an independent confirmation. *at any R* is independent: the saving with a quarter, a third, a
  half and all of T for rollouts. *R within 3 points* lists the numbers of rollout GPUs, in whole
  engines, with a saving near the published one.
* s is measured here by the scheduler's own core, with 15 % jitter and switches by state size. It
  follows from the published durations alone.

Both jobs of a pair are of one size and begin together; each runs `CYCLES` cycles. Means over
`SEEDS` seeds, `±` their standard error.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.report import Part
from benchmarks.sizes import sized
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import Behaviour, Pool, Scenario
from plexrl.traces import MODEL_CLASSES, TraceJob
from plexrl.traces.generate.published import ModelClass

PUBLISHED = {"7B": 0.3136, "30B": 0.3010, "235B": 0.3758}
ROLLOUT_TENSOR_PARALLEL = {"7B": 2, "30B": 2, "235B": 8}
"""Tab. 1: GPUs of one engine."""
TOLERANCE = 0.03
RATIOS = (0.25, 1 / 3, 0.5, 1.0)
"""Ratios of rollout to training GPUs."""
CYCLES = sized(300, quick=3)
SEEDS = sized((1, 2, 3, 4), quick=(1, 2))

COLUMNS = (
    *("two jobs", "steps +mean", "median", "p95", "T + R", "saved", "published", "off by"),
    *("at R = T/4, T/3, T/2, T", "R within 3 points"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two equal jobs."""

    model: str

    def jobs(self) -> Iterator[TraceJob]:
        """Both at the start."""
        kind = MODEL_CLASSES[self.model]
        for name in ("a", "b"):
            yield TraceJob(
                job_id=name,
                submit_s=0.0,
                gpus=kind.gpus,
                rollout_gpus=kind.rollout_gpus,
                cycles=CYCLES,
                **kind.demand(),
            )


def run(kind: ModelClass, *, groups: int, staleness: int, seed: int) -> SimResult:
    """Both jobs on so many groups."""
    scenario = Scenario(
        source=Pair(model=kind.name),
        pools=(Pool(nodes=groups * kind.gpus // 8),),
        policy="pack" if groups == 1 else "isolated",
        behaviour=Behaviour(staleness=staleness),
        seed=seed,
    )
    return simulate(scenario)


def saving(training: int, rollout: float, slowdown: float) -> float:
    """Saved part of a step's GPU-hours."""
    return 1.0 - (1.0 + slowdown) * (training / 2 + rollout) / (training + rollout)


def fitting_counts(kind: ModelClass, slowdown: float) -> str:
    """Numbers of rollout GPUs, in whole engines, with which the saving comes within the
    tolerance."""
    engine = ROLLOUT_TENSOR_PARALLEL[kind.name]
    near = [
        count
        for count in range(engine, 2 * kind.gpus + 1, engine)
        if abs(saving(kind.gpus, count, slowdown) - PUBLISHED[kind.name]) <= TOLERANCE
    ]
    return f"{near[0]} to {near[-1]}" if near else "none"


def measure(*, full: bool) -> Part:
    """Each size, with one step of staleness and without."""
    del full
    part = Part(title="Two jobs on one training group", columns=COLUMNS)
    for staleness, word in ((1, "one step stale"), (0, "synchronous")):
        for kind in MODEL_CLASSES.values():
            saved, slower, shares = [], [], []
            for seed in SEEDS:
                split = run(kind, groups=2, staleness=staleness, seed=seed)
                packed = run(kind, groups=1, staleness=staleness, seed=seed)
                saved.append(1.0 - packed.gpu_hours_per_cycle / split.gpu_hours_per_cycle)
                slower.append(packed.drain_s / split.drain_s - 1.0)
                shares.append(packed.cycle_slowdown)
            mean, published = fmean(saved), PUBLISHED[kind.name]
            error = stdev(saved) / math.sqrt(len(saved))
            cost = fmean(slower)
            anyhow = (saving(kind.gpus, ratio * kind.gpus, cost) for ratio in RATIOS)
            part.rows.append(
                (
                    f"{kind.name}, {word}",
                    f"{cost:.1%}",
                    f"{fmean(each.median for each in shares):.1%}",
                    f"{fmean(each.p95 for each in shares):.1%}",
                    f"{kind.gpus} + {kind.rollout_gpus}",
                    f"{mean:.2%} ± {error:.2%}",
                    f"{published:.2%}",
                    f"{100 * (mean - published):+.1f}",
                    ", ".join(f"{part:.0%}" for part in anyhow),
                    fitting_counts(kind, cost),
                )
            )
            mark = "" if staleness else "_synchronous"
            part.figures[f"saved_{kind.name}{mark}"] = mean
            part.figures[f"sharing_slowdown_{kind.name}{mark}"] = cost
    return part
