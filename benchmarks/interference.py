"""Compares contention predicted at placement with simulated contention (PlexRL §7.2).

    python benchmarks/interference.py [--quick] [--json]

The scheduler's own core places jobs with declared demand on one group by policy `spread`, on a
virtual clock, and each job runs `CYCLES` cycles per seed. *predicted* is what the last placement
recorded: waiting / (waiting + running), averaged over the group's members; mean over seeds, since
by then a few cycles of the seed have refined the other members' demand. *profiler* is what the
core's profiler then measured, *measured* the same from the simulator's records: mean over jobs and
seeds, `±` its standard error over seeds. A prediction holds within 10 % of the measured part
(`rel`), or below 10 % within one percentage point (`abs`). *overlap* is the baseline: the overlap
of the planned footprints at the last placement, as a part of the cycle. The service level is off
(`waiting_part_max` 1, `load_max` 8, `overlap_max` 1); otherwise saturated groups would be refused.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from benchmarks.report import report
from benchmarks.simulating.shared_group import SharedGroup
from benchmarks.sizes import sized
from plexrl.scheduler.placement.contention.contention import Resident, predict
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.traces import MODEL_CLASSES

RESIDENTS = sized((2, 3, 4), quick=(2,))
SIGMAS = sized((0.0, 0.15), quick=(0.15,))
SWITCHES_S = sized((2.0, 8.0), quick=(8.0,))
MIXES = sized(
    (("7B", "30B"), ("30B", "235B"), ("7B", "30B", "235B"), ("7B", "30B", "235B", "7B")),
    quick=(("7B", "30B"),),
)
SEEDS = sized(tuple(range(1, 5)), quick=(1, 2))
CYCLES = sized(200, quick=20)
"""Counted cycles of each job and seed, after the warm-up."""
WARM_UP = sized(20, quick=5)
PROFILED_CYCLES = 8
"""Cycles that one reading of the profiler spans."""
UNBOUNDED = {"policy": "spread", "waiting_part_max": 1.0, "load_max": 8.0, "overlap_max": 1.0}
"""Scheduler settings under which no group is too busy."""
RELATIVE, ABSOLUTE = 0.10, 0.01
"""Bounds on the difference: relative to the measured part, and absolute if it is below
`RELATIVE`."""


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


def run(task: tuple[Cell, int]) -> Run:
    """Place and run one cell's jobs."""
    cell, seed = task
    group = SharedGroup(
        cell.names,
        settings=UNBOUNDED,
        cycles=WARM_UP + CYCLES,
        sigma=cell.sigma,
        switch_s=cell.switch_s,
        seed=seed,
    )
    readings: dict[str, list[float]] = {job: [] for job in group.jobs}
    for cycles in range(WARM_UP, WARM_UP + CYCLES + 1, min(PROFILED_CYCLES, CYCLES)):
        group.run(cycles)
        for job in group.jobs:
            waiting_part = group.explain(job)["waiting_part"]
            if cycles > WARM_UP and waiting_part is not None:
                readings[job].append(waiting_part)
    explained = [group.explain(job) for job in group.jobs]
    last = max((each["placement"] for each in explained), key=lambda placement: placement["at"])
    shared_s = 2.0 * sum(each["placement"]["overlap_s"] for each in explained)
    periods_s = sum(each["profile"]["period_s"] for each in explained)
    return Run(
        predicted=last["contention"],
        overlap=shared_s / periods_s,
        profiler=fmean(fmean(each) for each in readings.values()),
        measured=fmean(group.waiting_part(job, WARM_UP) for job in group.jobs),
    )


def holds(predicted: float, measured: float) -> tuple[bool, str]:
    """Whether a prediction is within the bound, and which bound applies."""
    if measured < RELATIVE:
        return abs(predicted - measured) <= ABSOLUTE, "abs"
    return abs(predicted - measured) <= RELATIVE * measured, "rel"


def prediction_ms(residents: int) -> float:
    """Median milliseconds of one prediction."""
    known = MODEL_CLASSES["7B"]
    busy = Segment(offset_s=0.0, duration_s=known.busy_s)
    jitter_s = SIGMAS[-1] * known.period_s
    trace = DemandTrace(period_s=known.period_s, segments=(busy,), jitter_s=jitter_s)
    each = Resident(trace=trace, load_s=SWITCHES_S[-1] / 2, offload_s=SWITCHES_S[-1] / 2)
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
    equal = [(name,) * residents for name in MODEL_CLASSES for residents in RESIDENTS]
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
