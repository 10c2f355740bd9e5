"""Predicts runs of a live embedded cluster from recordings of other runs, and compares.

    python -m benchmarks.simulating.fidelity [--quick] [--json] [--full]

Four jobs of different size share one training group: real controllers, processes, models, switches
and scheduler. Only rollouts are controllers that sleep (lognormal, sigma 0.2, as are the sizes of
the batches). `SOURCES` are recorded, and give each job's profile. `PREDICTED` are runs of other
mixes with other seeds. Of these the forecast knows the list of jobs (names, submissions, numbers
of cycles) and nothing else; it is what `plexrl fidelity RUN --from SOURCE` prints. The runs
alternate, so that a machine which grows busier changes both.

Compared is each job's mean cycle after `WARM_UP_CYCLES`; a cycle goes from the end of a publish to
the end of the next. *nobody waits* and *FIFO* are simpler forecasts from the same profiles. A skill
is `1 - mean error / mean error of the simpler forecast`. `fidelity_median_error` and
`fidelity_p95_error` are over the jobs of all predicted runs.

Before the first run each job's training is timed, and its rollouts get the length with which it
needs the group for its `duty`; so a slow machine has the same contention. The profile does not use
these times. Operations compute on one core, and only one job has the group at a time, so jobs slow
each other mostly by waiting; processes of others on the machine slow single operations and are
part of the error. The table has the machine's load average of each run.

During all runs waiting operations are asked about (`job.explain()`): `eta_live_coverage` is the
part of the answers whose operation starts inside the 80 % interval, `eta_live_coverage_error` its
distance from 0.8, `eta_live_score_ratio` its interval score by that of an interval from half to
twice the estimate (`benchmarks.simulating.eta`).
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.report import Part, report
from benchmarks.simulating.eta import Answer, quality
from benchmarks.simulating.live_jobs import LiveJob, LiveRun, run_live
from benchmarks.sizes import sized
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.sim.fidelity.fidelity import WARM_UP_CYCLES
from plexrl.sim.fidelity.forecast import ForecastError, Skill, skill_of
from plexrl.sim.fidelity.planning import planning_of
from plexrl.sim.fidelity.run_forecast import forecast_run, profiles_in
from plexrl.traces.convert.history import History, history_of

JOBS = {
    "a": (LiveJob(name="a", rows=8, hidden=128), 0.12),
    "b": (LiveJob(name="b", rows=10, hidden=192), 0.18),
    "c": (LiveJob(name="c", rows=10, hidden=256), 0.22),
    "d": (LiveJob(name="d", rows=12, hidden=384), 0.33),
}
"""The jobs, and the part of a cycle for which each needs the group."""
SOURCES = ("ab", "cd")
PREDICTED = ("abcd", "bcd")
POLICY = "pack"
TIMED_CYCLES = sized(6, quick=3)
SOURCE_S, PREDICTED_S, FULL_FACTOR = sized(30.0, quick=2.0), sized(50.0, quick=2.0), 4.0
"""Seconds of a run, and how much longer runs are with `--full`."""
CYCLES_MIN = 2 * WARM_UP_CYCLES
SLOWDOWN = 1.2
"""Assumed slowdown of a shared cycle: the jobs of a run get cycles for about the same time."""
SEEDS = sized(tuple(range(1, 11)), quick=(1,))
"""Seeds of the simulated runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One predicted run."""

    mix: str
    jobs: tuple[ForecastError, ...]
    machine_load: float
    """Load average of the machine over the last minute of the run."""


def live(
    embedded: EmbeddedCluster, mix: str, jobs: Mapping[str, LiveJob], *, seconds: float, seed: int
) -> LiveRun:
    """One run of about `seconds`."""
    plans = []
    for name in mix:
        job, duty = jobs[name], JOBS[name][1]
        period_s = job.rollout_s / (1.0 - duty)
        cycles = max(CYCLES_MIN, round(seconds / SLOWDOWN / period_s))
        plans.append(replace(job, cycles=cycles))
    return run_live(embedded, plans, label=f"{mix}-{seed}", seed=seed)


def history(run: LiveRun) -> History:
    """The run's history."""
    return history_of(run.jobs, run.operations, run.status)


def answers(run: LiveRun) -> list[Answer]:
    """What was told of waiting operations, and when they started."""
    started = {row["operation"]: row for row in run.operations if row["started_at"] is not None}
    found = []
    for row in run.explained:
        if (ran := started.get(row["operation"])) is not None:
            waited_s = ran["started_at"] - ran["submitted_at"] - row["waited_s"]
            found.append(
                Answer(
                    eta_s=row["eta_s"],
                    low_s=row["eta_low_s"],
                    high_s=row["eta_high_s"],
                    waited_s=max(0.0, waited_s),
                )
            )
    return found


def timed(embedded: EmbeddedCluster) -> dict[str, LiveJob]:
    """The jobs, with rollouts of the length that gives each its duty."""
    plans = [replace(job, cycles=TIMED_CYCLES) for job, _ in JOBS.values()]
    run = run_live(embedded, plans, label="timed", seed=0)
    profiles, _ = profiles_in([history(run)], warm_up=1)
    busy_s = {
        name: fmean(sum(cycle.segments_s) for cycle in profile.cycles)
        for name, profile in profiles.items()
    }
    return {
        name: replace(job, rollout_s=busy_s[name] * (1.0 / duty - 1.0))
        for name, (job, duty) in JOBS.items()
    }


def run_all(*, full: bool) -> tuple[list[Found], list[Answer]]:
    """Record all runs, and predict each of `PREDICTED` from `SOURCES`; with the answers about
    waiting operations."""
    factor = FULL_FACTOR if full else 1.0
    sources: list[History] = []
    targets: list[tuple[str, History, float]] = []
    told: list[Answer] = []
    embedded = start_embedded(virtual_gpus=1 + len(JOBS), policy=POLICY, ordering="hrrs")
    try:
        jobs = timed(embedded)
        for seed, (source, target) in enumerate(zip(SOURCES, PREDICTED, strict=True), 1):
            run = live(embedded, source, jobs, seconds=factor * SOURCE_S, seed=seed)
            sources.append(history(run))
            told += answers(run)
            run = live(embedded, target, jobs, seconds=factor * PREDICTED_S, seed=100 + seed)
            targets.append((target, history(run), os.getloadavg()[0]))
            told += answers(run)
    finally:
        embedded.close()
    found = [
        Found(
            mix=mix,
            jobs=forecast_run(
                past, sources, planning_of([past], None), seeds=SEEDS, warm_up=WARM_UP_CYCLES
            ).jobs,
            machine_load=machine_load,
        )
        for mix, past, machine_load in targets
    ]
    return found, told


def measure(*, full: bool) -> Part:
    """All runs; `full`: longer ones."""
    found, told = run_all(full=full)
    compared = [job for each in found for job in each.jobs]
    skill = skill_of(compared)
    figures = {
        "fidelity_median_error": skill.forecast.median,
        "fidelity_p95_error": skill.forecast.p95,
        "fidelity_skill": skill.skill,
        "fidelity_skill_fifo": skill.skill_over_fifo,
        "fidelity_alone_median_error": skill.alone.median,
        "fidelity_fifo_median_error": skill.fifo.median,
        "fidelity_jobs": len(compared),
        **quality(told, "eta_live"),
        "eta_live_answers": len(told),
        "fidelity_machine_load": fmean(each.machine_load for each in found),
    }
    rows = [row for each in found for row in _rows(each)]
    return Part(
        title=f"Cycles of a live cluster, predicted from runs of {' and '.join(SOURCES)}",
        columns=("run", "cycles", "measured", "forecast", "p95", "FIFO", "nobody waits", "load"),
        rows=[*rows, _errors(skill)],
        figures=figures,
    )


def _rows(found: Found) -> list[tuple[str, ...]]:
    """One row for the run and one for each job."""
    rows: list[tuple[str, ...]] = [
        (", ".join(found.mix), *[""] * 6, f"{found.machine_load:.1f}"),
    ]
    for each in found.jobs:
        predicted, measured_s = each.forecast, each.measured_mean_s
        rows.append(
            (
                f"  {predicted.job}",
                str(each.cycles),
                f"{measured_s:.3f} s",
                _said(predicted.mean_s, measured_s),
                _said(predicted.p95_s, each.measured_p95_s),
                _said(predicted.fifo_s, measured_s),
                _said(predicted.alone_s, measured_s),
                "",
            )
        )
    return rows


def _errors(skill: Skill) -> tuple[str, ...]:
    found = (skill.forecast, skill.fifo, skill.alone)
    forecast, fifo, alone = (f"{each.median:.1%} / {each.p95:.1%}" for each in found)
    return ("error, median / p95", "", "", forecast, "", fifo, alone, "")


def _said(predicted_s: float, measured_s: float) -> str:
    return f"{predicted_s:.2f} {100 * (predicted_s / measured_s - 1.0):+.1f}%"


def main() -> None:
    """Measure and report."""
    found = measure(full="--full" in sys.argv)
    report(found.title, found.columns, found.rows, found.figures)


if __name__ == "__main__":
    main()
