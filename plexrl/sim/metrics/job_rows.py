"""Builds one table row for each job of a run when the job ends. Pure.

Memory grows with the live jobs: each has a sketch of its cycles and the names of its groups.
"""

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
    """Duration of its cycles on GPUs of its own, without moves of its state."""
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
class JobDetails:
    """Figures for a job's row alone, collected while the job lives."""

    slowdowns: Sketch | None = None
    """Slowdowns of its cycles; absent before the first cycle."""
    groups: dict[str, None] = field(default_factory=dict)
    switches: int = 0
    move_gpu_s: float = 0.0

    def cycle_ended(self, slowdown: float) -> None:
        """Record a completed cycle."""
        if self.slowdowns is None:
            self.slowdowns = Sketch()
        self.slowdowns.add(slowdown)

    def ran(self, group: str) -> None:
        """Record a run on a group."""
        if len(self.groups) <= GROUPS_MAX:
            self.groups[group] = None

    def row(
        self,
        job: TraceJob,
        *,
        submitted_at: float,
        placed_at: float | None,
        ended_at: float,
        outcome: str,
        alone_s: float,
        busy_gpu_s: float,
    ) -> JobRow:
        """The row of the ended job."""
        run_s = None if placed_at is None else ended_at - placed_at
        cycles = None if self.slowdowns is None else self.slowdowns.distribution()
        named = list(self.groups)
        shown = [*named[:GROUPS_MAX], "…"] if len(named) > GROUPS_MAX else named
        return JobRow(
            job_id=job.job_id,
            tenant=job.tenant,
            outcome=outcome,
            gpus=job.gpus,
            rollout_gpus=job.rollout_gpus,
            submit_s=submitted_at,
            start_s=placed_at,
            end_s=ended_at,
            wait_s=None if placed_at is None else placed_at - submitted_at,
            run_s=run_s,
            alone_s=alone_s,
            slowdown=run_s / alone_s - 1 if run_s is not None and alone_s > 0 else None,
            cycles=0 if cycles is None else cycles.count,
            cycle_slowdown_mean=None if cycles is None else cycles.mean,
            cycle_slowdown_p95=None if cycles is None else cycles.p95,
            groups=";".join(shown),
            switches=self.switches,
            busy_gpu_hours=busy_gpu_s / HOUR_S,
            switch_gpu_hours=self.move_gpu_s / HOUR_S,
            rollout_gpu_hours=job.rollout_gpus * (run_s or 0.0) / HOUR_S,
        )
