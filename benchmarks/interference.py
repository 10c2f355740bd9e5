"""Contention predicted at placement beside contention in the simulated runtime (PlexRL §7.2).

    python benchmarks/interference.py [--quick] [--json]

Jobs are placed by policy `spread` on one group, with their demand declared, by the scheduler's own
core on a virtual clock, and then run for `CYCLES` cycles each and seed. *predicted* is what the
last placement recorded: waiting / (waiting + running) on average over the group's members; mean
over seeds, since by then the others' demand is what a few cycles of the seed's have shown of it.
*profiler* is what the core's profiler then measured, *measured* the same from the simulator's own
records: mean over jobs and seeds, `±` its standard error over seeds. A prediction is held to 10 %
of the measured part (`rel`), or where that is below 10 % to one percentage point (`abs`): both
differences stand in the table. *overlap* is the baseline: the overlap of the plans' footprints at
the last placement, as part of the cycle. The service level is switched off (`waiting_part_max` 1,
`load_max` 8, `overlap_max` 1), or saturated groups would be refused and there were nothing to see.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.scheduler.placement.contention import Resident, predict
from plexrl.scheduler.state.demand import DemandTrace, Segment
from plexrl.scheduler.state.estimates import MOVE_BYTES_PER_S
from plexrl.sim import PUBLISHED, JobPlan, JobProfile, VirtualCluster, published, virtual_config

RESIDENTS = sized((2, 3, 4), quick=(2,))
SIGMAS = sized((0.0, 0.15), quick=(0.15,))
SWITCHES_S = sized((2.0, 8.0), quick=(8.0,))
MIXES = sized(
    (("7B", "30B"), ("30B", "235B"), ("7B", "30B", "235B"), ("7B", "30B", "235B", "7B")),
    quick=(("7B", "30B"),),
)
SEEDS = sized(tuple(range(1, 5)), quick=(1, 2))
CYCLES = sized(200, quick=20)
"""Of each job and seed, after the warm-up."""
WARM_UP = sized(20, quick=5)
RELATIVE, ABSOLUTE = 0.10, 0.01
"""Bounds on the difference: of the measured part, and where that is below `RELATIVE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of the table."""

    names: tuple[str, ...]
    sigma: float
    switch_s: float

    @property
    def label(self) -> str:
        same = len(set(self.names)) == 1
        who = f"{self.names[0]} x{len(self.names)}" if same else "+".join(self.names)
        return f"{who} s{self.sigma:g} {self.switch_s:.0f}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One seed of a cell; parts from 0 to 1."""

    predicted: float
    overlap: float
    profiler: float
    measured: float


def declared(profile: JobProfile) -> DemandTrace:
    """What the profile does alone, as a user would declare it: one burst a cycle, and how much the
    whole cycle varies."""
    work_s = profile.log_prob_s + profile.update_s
    busy_s = work_s + profile.sync_s + 2 * profile.controller_s
    shared = 2.0 * profile.shared_draw * profile.rollout_sigma * profile.train_sigma
    variance = (profile.rollout_sigma * profile.rollout_s) ** 2
    variance += (profile.train_sigma * work_s) ** 2 + shared * profile.rollout_s * work_s
    return DemandTrace(
        period_s=profile.cycle_s + 3 * profile.controller_s,
        segments=(Segment(offset_s=0.0, duration_s=busy_s),),
        jitter_s=sqrt(variance),
    )


def run(task: tuple[Cell, int]) -> Run:
    """Place and run one cell's jobs."""
    cell, seed = task
    plans = []
    for number, name in enumerate(cell.names):
        profile = published(name, sigma=cell.sigma, switch_s=cell.switch_s)
        # The size from which the scheduler, before it has seen one, estimates the same switch.
        state_bytes = round(profile.load_s * MOVE_BYTES_PER_S)
        profile = replace(profile, state_bytes=state_bytes)
        plans.append(
            JobPlan(
                name=f"job{number}",
                profile=profile,
                start_s=number * profile.cycle_s / len(cell.names),
                cycles=CYCLES,
                warm_up=WARM_UP,
                trace=declared(profile),
            )
        )
    config = virtual_config(policy="spread", waiting_part_max=1.0, load_max=8.0, overlap_max=1.0)
    cluster = VirtualCluster(plans, seed=seed, config=config)
    jobs = cluster.run().jobs
    told = [cluster.explained(plan.name) for plan in plans]
    last = max((each["placement"] for each in told), key=lambda placement: placement["at"])
    shared_s = 2.0 * sum(each["placement"]["overlap_s"] for each in told)
    periods_s = sum(each["profile"]["period_s"] for each in told)
    return Run(
        predicted=last["contention"],
        overlap=shared_s / periods_s,
        profiler=fmean(fmean(job.profiled) for job in jobs),
        measured=fmean(job.waiting_part for job in jobs),
    )


def holds(predicted: float, measured: float) -> tuple[bool, str]:
    """Whether a prediction is near enough, and by which of the two bounds."""
    if measured < RELATIVE:
        return abs(predicted - measured) <= ABSOLUTE, "abs"
    return abs(predicted - measured) <= RELATIVE * measured, "rel"


def prediction_ms(residents: int) -> float:
    """Median milliseconds of one prediction."""
    profile = published("7B", sigma=SIGMAS[-1], switch_s=SWITCHES_S[-1])
    each = Resident(trace=declared(profile), load_s=profile.load_s, offload_s=profile.offload_s)
    took = []
    for _ in range(31):
        began = time.perf_counter()
        predict([each] * residents)
        took.append(1e3 * (time.perf_counter() - began))
    return sorted(took)[len(took) // 2]


def rows_of(
    cells: Sequence[Cell], runs: dict[Cell, list[Run]], figures: dict[str, float]
) -> tuple[list[tuple[str, ...]], int, int]:
    """The table's rows, how many hold, and how many the baseline would have held."""
    rows: list[tuple[str, ...]] = []
    held = baseline_held = 0
    for cell in cells:
        found = runs[cell]
        predicted = fmean(each.predicted for each in found)
        measured = fmean(each.measured for each in found)
        error = stdev(each.measured for each in found) / sqrt(len(found))
        profiler = fmean(each.profiler for each in found)
        overlap = fmean(each.overlap for each in found)
        is_held, bound = holds(predicted, measured)
        held += is_held
        baseline_held += holds(overlap, measured)[0]
        difference = predicted - measured
        relative = f"{100 * difference / measured:+.0f} %" if measured > 1e-6 else "-"
        key = cell.label.replace(" ", "_")
        figures[f"{key}_predicted"], figures[f"{key}_measured"] = predicted, measured
        figures[f"{key}_profiler"], figures[f"{key}_overlap"] = profiler, overlap
        figures[f"{key}_holds"] = is_held
        rows.append(
            (
                cell.label,
                f"{100 * overlap:.1f}",
                f"{100 * predicted:.2f}",
                f"{100 * measured:.2f}±{100 * error:.2f}",
                f"{100 * profiler:.2f}",
                f"{100 * difference:+.2f}",
                relative,
                f"{'yes' if is_held else 'NO'} {bound}",
            )
        )
    return rows, held, baseline_held


def main() -> None:
    """Measure all cells and say where the prediction holds."""
    equal = [(name,) * residents for name in PUBLISHED for residents in RESIDENTS]
    cells = [
        Cell(names=names, sigma=sigma, switch_s=switch_s)
        for names in [*equal, *MIXES]
        for sigma in SIGMAS
        for switch_s in SWITCHES_S
    ]
    # Without variation all seeds are the same run.
    tasks = [(cell, seed) for cell in cells for seed in (SEEDS if cell.sigma else SEEDS[:2])]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(run, tasks, chunksize=4))
    runs: dict[Cell, list[Run]] = {}
    for (cell, _), each in zip(tasks, found, strict=True):
        runs.setdefault(cell, []).append(each)
    figures = {f"prediction_ms_{count}": prediction_ms(count) for count in RESIDENTS}
    rows, held, baseline_held = rows_of(cells, runs, figures)
    figures |= {"cells": len(cells), "cells_held": held, "cells_held_by_overlap": baseline_held}
    cost = ", ".join(f"{figures[f'prediction_ms_{n}']:.1f} ms for {n}" for n in RESIDENTS)
    report(
        f"Contention in % of a cycle: the prediction holds in {held} of {len(cells)} cells, the "
        f"overlap of the plans in {baseline_held}; a prediction takes {cost}",
        ("cell", "overlap", "predicted", "measured", "profiler", "diff", "rel", "within"),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
