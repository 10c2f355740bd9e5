"""Compares cycle times on a live embedded cluster with those of the simulator.

    python -m benchmarks.simulating.fidelity [--quick] [--json] [--full]

Jobs of different size share one training group: real controllers, processes, models and switches.
Only rollouts are simulated, by controllers that sleep (lognormal, sigma 0.2, as are the sizes of
the batches). A cycle goes from the end of a publish to the end of the next.

Inputs of the simulator: from each job alone on the group (`ALONE_CYCLES` cycles), the control-plane
overhead of each kind of operation; from the shared run, each cycle's own rollout and gaps, the
workers' compute times, and the mean durations of moves. It receives no waits, orders or durations
of shared cycles. *replay*: median cycles, and `|predicted / measured - 1|` cycle by cycle as
median, mean and 95th percentile. *law*: median cycles predicted with drawn cycles from the row that
`plexrl traces record` makes of the run. *alone*: the baseline, which predicts no waiting.
`fidelity_median_error` is the median of replay's errors over the cycles of all runs.

The duration of rollouts is chosen so that the group has load `LOAD`, so a slow or busy machine has
the same contention. The table has the machine's load average of each run.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from benchmarks.report import Part, report
from benchmarks.simulating.live_jobs import LiveJob, LiveRun, run_live
from benchmarks.sizes import sized
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.sim.fidelity.fidelity import (
    Comparison,
    Errors,
    JobError,
    compare_drawn,
    compare_recorded,
    errors_of,
)
from plexrl.sim.fidelity.recording import Overheads, overheads, recorded_run
from plexrl.traces.convert.recorder import record

JOBS = (
    LiveJob(name="a", rows=9, hidden=192),
    LiveJob(name="b", rows=9, hidden=256),
    LiveJob(name="c", rows=7, hidden=320),
    LiveJob(name="d", rows=6, hidden=384),
)
RUNS = sized((("hrrs", (2, 4)), ("fifo-bursts", (3,))), quick=(("hrrs", (1,)),))
"""Numbers of jobs by ordering."""
POLICIES = {"hrrs": "pack", "fifo-bursts": "fifo-lock"}
"""The simulator's policy of each ordering, with placement by `pack`."""
LOAD = 0.75
ALONE_CYCLES = sized(12, quick=4)
CYCLES, FULL_CYCLES = sized(40, quick=4), 100
"""Smallest number of cycles of each job in a shared run."""
SEEDS = sized((1, 2, 3, 4, 5), quick=(1,))
"""Seeds of the drawn cycles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One shared run."""

    ordering: str
    replay: Comparison
    law: tuple[JobError, ...]
    machine_load: float
    """Load average of the machine over the last minute of the run."""


def run_alone(embedded: EmbeddedCluster, job: LiveJob) -> tuple[Overheads, float]:
    """Control-plane overhead of the job's operations, and seconds of a cycle on the group."""
    alone = run_live(embedded, [job], label="alone", cycles=ALONE_CYCLES, seed=0)
    actor = [row for row in alone.operations if row["deployment"].endswith("/actor")]
    beyond = overheads(actor)
    (found,) = recorded_run(alone.jobs, alone.operations, {job.name: beyond})
    return beyond, median(sum(cycle.segments_s) for cycle in found.cycles)


def run_shared(
    embedded: EmbeddedCluster,
    ordering: str,
    jobs: Sequence[LiveJob],
    alone: Mapping[str, tuple[Overheads, float]],
    cycles: int,
) -> Found:
    """Run the jobs together and predict the run."""
    sharers = [
        replace(job, rollout_s=alone[job.name][1] * (len(jobs) / LOAD - 1.0)) for job in jobs
    ]
    run = run_live(embedded, sharers, label=f"of-{len(jobs)}", cycles=cycles, seed=1)
    machine_load = os.getloadavg()[0]
    beyond = {job.name: alone[job.name][0] for job in jobs}
    return found_in(run, ordering, beyond, machine_load)


def found_in(
    run: LiveRun, ordering: str, beyond: dict[str, Overheads], machine_load: float
) -> Found:
    """Both predictions of a recorded run."""
    policy = POLICIES[ordering]
    recorded = recorded_run(run.jobs, run.operations, beyond)
    names = {view["job"]: view["name"] for view in run.jobs}
    rows = record(run.jobs, run.operations, run.ended_at)
    return Found(
        ordering=ordering,
        replay=compare_recorded(recorded, policy),
        law=compare_drawn(rows, recorded, policy, SEEDS, names=names),
        machine_load=machine_load,
    )


def measure(*, full: bool) -> Part:
    """All runs; `full`: longer ones."""
    cycles = FULL_CYCLES if full else CYCLES
    found: list[Found] = []
    for ordering, counts in RUNS:
        embedded = start_embedded(gpus_per_node=1 + max(counts), policy="pack", ordering=ordering)
        try:
            alone = {job.name: run_alone(embedded, job) for job in JOBS[-max(counts) :]}
            found += [
                run_shared(embedded, ordering, JOBS[-count:], alone, cycles) for count in counts
            ]
        finally:
            embedded.close()
    compared = [cycle for each in found for cycle in each.replay.cycles]
    by_law = [abs(job.error) for each in found for job in each.law]
    errors = errors_of([cycle.error for cycle in compared])
    unwaited = errors_of([cycle.alone_error for cycle in compared])
    figures = {
        "fidelity_median_error": errors.median,
        "fidelity_mean_error": errors.mean,
        "fidelity_p95_error": errors.p95,
        "fidelity_alone_median_error": unwaited.median,
        "fidelity_law_median_error": median(by_law),
        "fidelity_law_worst_error": max(by_law),
        "fidelity_cycles": len(compared),
        "fidelity_machine_load": fmean(each.machine_load for each in found),
    }
    return Part(
        title="Cycles of the live embedded cluster, and as simulated",
        columns=("run", "cycles", "measured", "replay", "of cycles, %", "law", "alone", "load"),
        rows=[row for each in found for row in _rows(each)],
        figures=figures,
    )


def _rows(found: Found) -> list[tuple[str, ...]]:
    """One row for the run and one for each job."""
    laws = {job.job: job for job in found.law}
    rows: list[tuple[str, ...]] = [
        (
            f"{found.ordering}, {len(found.replay.jobs)} jobs",
            str(len(found.replay.cycles)),
            "",
            "",
            _percents(found.replay.errors),
            "",
            f"{100 * found.replay.alone_errors.median:.1f} %",
            f"{found.machine_load:.1f}",
        )
    ]
    for job in found.replay.jobs:
        own = [cycle.error for cycle in found.replay.cycles if cycle.job == job.job]
        rows.append(
            (
                f"  {job.job}",
                str(job.cycles),
                f"{job.measured_s:.2f} s",
                _said(job.predicted_s, job.measured_s),
                _percents(errors_of(own)),
                _said(laws[job.job].predicted_s, job.measured_s),
                _said(job.alone_s, job.measured_s),
                "",
            )
        )
    return rows


def _said(predicted_s: float, measured_s: float) -> str:
    return f"{predicted_s:.2f} {100 * (predicted_s / measured_s - 1.0):+.0f}%"


def _percents(errors: Errors) -> str:
    return f"{100 * errors.median:.1f}/{100 * errors.mean:.1f}/{100 * errors.p95:.0f}"


def main() -> None:
    """Measure and report."""
    found = measure(full="--full" in sys.argv)
    report(found.title, found.columns, found.rows, found.figures)


if __name__ == "__main__":
    main()
