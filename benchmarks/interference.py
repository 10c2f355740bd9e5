"""Compares contention predicted at placement with simulated contention (PlexRL §7.2).

    python benchmarks/interference.py [--quick] [--json]

The scheduler's own core places jobs on one group by policy `spread`, on a virtual clock, and each
job runs `CYCLES` cycles per seed. *measured* is waiting / (waiting + running) in the simulator's
records: mean over jobs and seeds, `±` its standard error over seeds. Three forecasts of it:

* *overlap*, the baseline: the overlap of the planned footprints at the last placement, as a part of
  the cycle;
* *declared*: what the last placement recorded. Its demand is the declared one, which is the truth,
  refined by a few cycles of the other members;
* *profiled*: predicted from the profiles that the scheduler has taken itself after `WARM_UP` cycles
  on the group, of jobs that declare nothing.

A forecast holds within 10 % of the measured part. Cells in which nobody waits are not counted. The
service level is off (`waiting_part_max` 1, `load_max` 8, `overlap_max` 1); otherwise saturated
groups would be refused.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, stdev

from benchmarks.report import report
from benchmarks.simulating.shared_group import SharedGroup
from benchmarks.sizes import sized
from plexrl.scheduler.placement.contention.contention import ContentionConfig, Resident, predict
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
UNBOUNDED = {
    "policy": "spread",
    "waiting_part_max": 1.0,
    "load_max": 8.0,
    "overlap_max": 1.0,
    "cold_start_patience_s": 0.0,
}
"""Scheduler settings under which no group is too busy, and jobs without a profile join at once."""
TOLERANCE = 0.10
"""Largest difference, as a part of the measured one."""
WAITING_MIN = 0.002
"""In a cell with less nobody waits."""


FORECASTS = ("overlap", "declared", "profiled")


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

    overlap: float
    declared: float
    profiled: float
    measured: float


def shared(cell: Cell, seed: int, *, warm: bool) -> SharedGroup:
    """The cell's jobs, which declare their demand if `warm`."""
    return SharedGroup(
        cell.names,
        settings=UNBOUNDED,
        cycles=WARM_UP + CYCLES,
        sigma=cell.sigma,
        switch_s=cell.switch_s,
        seed=seed,
        warm=warm,
    )


def from_profiles(cell: Cell, seed: int) -> float:
    """The contention predicted from the profiles that the scheduler has taken."""
    group = shared(cell, seed, warm=False)
    group.run(WARM_UP)
    one_way_s = cell.switch_s / 2
    residents = []
    for job in group.jobs:
        profile = group.explain(job)["profile"]
        trace = DemandTrace(
            period_s=profile["period_s"],
            segments=tuple(Segment(**each) for each in profile["segments"]),
            jitter_s=profile["jitter_s"],
            cycles=profile["cycles"],
        )
        residents.append(Resident(trace=trace, load_s=one_way_s, offload_s=one_way_s))
    return predict(residents, ContentionConfig(guards_slack=True)).group


def run(task: tuple[Cell, int]) -> Run:
    """Place and run one cell's jobs."""
    cell, seed = task
    group = shared(cell, seed, warm=True)
    group.run(WARM_UP + CYCLES)
    explained = [group.explain(job) for job in group.jobs]
    last = max((each["placement"] for each in explained), key=lambda placement: placement["at"])
    shared_s = 2.0 * sum(each["placement"]["overlap_s"] for each in explained)
    periods_s = sum(each["profile"]["period_s"] for each in explained)
    return Run(
        overlap=shared_s / periods_s,
        declared=last["contention"],
        profiled=from_profiles(cell, seed),
        measured=fmean(group.waiting_part(job, WARM_UP) for job in group.jobs),
    )


def holds(predicted: float, measured: float) -> bool:
    """Whether a forecast is within the bound."""
    return abs(predicted - measured) <= TOLERANCE * measured


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


def main() -> None:
    """Measure all cells and say where the forecasts hold."""
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
    held = dict.fromkeys(FORECASTS, 0)
    errors: dict[str, list[float]] = {name: [] for name in FORECASTS}
    rows: list[tuple[str, ...]] = []
    for cell in cells:
        measured = fmean(each.measured for each in runs[cell])
        error = stdev(each.measured for each in runs[cell]) / sqrt(len(runs[cell]))
        waits = measured >= WAITING_MIN
        columns = []
        for name in FORECASTS:
            forecast = fmean(getattr(each, name) for each in runs[cell])
            columns.append(f"{100 * forecast:.2f}")
            if waits:
                is_held = holds(forecast, measured)
                held[name] += is_held
                errors[name].append(abs(forecast / measured - 1.0))
                columns[-1] += "" if is_held else " *"
        rows.append((cell.label, *columns, f"{100 * measured:.2f}±{100 * error:.2f}"))
    count = len(errors[FORECASTS[0]])
    figures |= {"cells": len(cells), "cells_with_waiting": count}
    figures |= {f"cells_held_{name}": float(held[name]) for name in FORECASTS}
    figures |= {f"median_error_{name}": median(errors[name]) for name in FORECASTS}
    cost = ", ".join(f"{figures[f'prediction_ms_{n}']:.1f} ms for {n}" for n in RESIDENTS)
    report(
        f"Contention in % of a cycle, * off by more than 10 %. Of {count} cells with waiting "
        f"hold: by overlap {held['overlap']}, by declared demand {held['declared']}, by profiles "
        f"{held['profiled']}. A prediction takes {cost}",
        ("cell", *FORECASTS, "measured"),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
