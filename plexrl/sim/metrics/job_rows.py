"""Builds one table row for each job of a run when the job ends. Pure.

Memory grows with the live jobs: each has a sketch of its cycles and the names of its groups.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from plexrl.sim.metrics.sketch import Sketch
from plexrl.sim.metrics.tenant_table import HOUR_S
from plexrl.traces import TraceJob

GROUPS_MAX = 16
"""Most groups that a row names; `…` stands for the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job of one run. Times are seconds from the start of the run; absent: not reached."""

    job_id: str
    tenant: str
    outcome: str
    """`completed` or `failed`."""
    gpus: int
    rollout_gpus: int
    submit_s: float
    start_s: float | None
    """Time of the first placement."""
    end_s: float
    wait_s: float | None
    """From submission to start."""
    run_s: float | None
    """From start to end."""
    alone_s: float
    """Duration of its cycles on GPUs of its own."""
    slowdown: float | None
    """`run_s / alone_s - 1`."""
    cycles: int
    """Completed cycles."""
    cycle_slowdown_mean: float | None
    cycle_slowdown_p95: float | None
    """Correct to 1 %."""
    groups: str
    """Training groups that it ran on, in order, separated by `;`."""
    switches: int
    """Number of offloads of its state for another job."""
    busy_gpu_hours: float
    """GPU-hours of training work, with work repeated after failures."""
    switch_gpu_hours: float
    """GPU-hours of loads and offloads of its own state."""
    rollout_gpu_hours: float


@dataclass(slots=True, kw_only=True)
class _Live:
    job: TraceJob
    submitted_at: float
    placed_at: float | None = None
    cycles: int = 0
    slowdowns: Sketch | None = None
    """Slowdowns of its cycles; absent before the first cycle."""
    groups: dict[str, None] = field(default_factory=dict)
    switches: int = 0
    busy_gpu_s: float = 0.0
    move_gpu_s: float = 0.0


class JobRows:
    """Receives the events of a run's jobs and calls `then` with a row when a job ends."""

    def __init__(self, then: Callable[[JobRow], None]) -> None:
        self._then = then
        self._jobs: dict[str, _Live] = {}

    def submitted(self, job: TraceJob, now: float) -> None:
        """Record the submission of a job."""
        self._jobs[job.job_id] = _Live(job=job, submitted_at=now)

    def placed(self, job_id: str, now: float) -> None:
        """Record the first placement of a job."""
        self._jobs[job_id].placed_at = now

    def cycle_ended(self, job_id: str, slowdown: float) -> None:
        """Record a completed cycle of a job."""
        live = self._jobs[job_id]
        live.cycles += 1
        if live.slowdowns is None:
            live.slowdowns = Sketch()
        live.slowdowns.add(slowdown)

    def ran(self, job_id: str, group: str, gpu_s: float, *, is_move: bool) -> None:
        """Record a run of a job on a group; runs of ended jobs are ignored."""
        live = self._jobs.get(job_id)
        if live is None:
            return
        if len(live.groups) <= GROUPS_MAX:
            live.groups[group] = None
        if is_move:
            live.move_gpu_s += gpu_s
        else:
            live.busy_gpu_s += gpu_s

    def switched(self, job_id: str) -> None:
        """Record an offload of a job's state."""
        self._jobs[job_id].switches += 1

    def ended(self, job_id: str, now: float, outcome: str, alone_s: float) -> None:
        """Record the end of a job and emit its row."""
        live = self._jobs.pop(job_id)
        start_s = live.placed_at
        run_s = None if start_s is None else now - start_s
        cycles = None if live.slowdowns is None else live.slowdowns.distribution()
        named = list(live.groups)
        shown = [*named[:GROUPS_MAX], "…"] if len(named) > GROUPS_MAX else named
        self._then(
            JobRow(
                job_id=job_id,
                tenant=live.job.tenant,
                outcome=outcome,
                gpus=live.job.gpus,
                rollout_gpus=live.job.rollout_gpus,
                submit_s=live.submitted_at,
                start_s=start_s,
                end_s=now,
                wait_s=None if start_s is None else start_s - live.submitted_at,
                run_s=run_s,
                alone_s=alone_s,
                slowdown=run_s / alone_s - 1 if run_s is not None and alone_s > 0 else None,
                cycles=live.cycles,
                cycle_slowdown_mean=None if cycles is None else cycles.mean,
                cycle_slowdown_p95=None if cycles is None else cycles.p95,
                groups=";".join(shown),
                switches=live.switches,
                busy_gpu_hours=live.busy_gpu_s / HOUR_S,
                switch_gpu_hours=live.move_gpu_s / HOUR_S,
                rollout_gpu_hours=live.job.rollout_gpus * (run_s or 0.0) / HOUR_S,
            )
        )
