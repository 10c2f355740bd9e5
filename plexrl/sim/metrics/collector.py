"""Collects the metrics of one run while it runs, in memory that does not grow with it. Pure.

The collector keeps a record of each job from `job_submitted` to `job_ended`, and of everything else
sums, sketches and bounded series. The order of calls affects rounding only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plexrl.scheduler.rules.config import WAITING_PART_MAX
from plexrl.sim.metrics.held_nodes import HeldNodes
from plexrl.sim.metrics.job_rows import JobDetails, JobRow
from plexrl.sim.metrics.kept_gpus import KeptGpus
from plexrl.sim.metrics.sketch import Sketch
from plexrl.sim.metrics.tenant_table import HOUR_S, TenantSums, TenantTable
from plexrl.sim.metrics.utilisation import Series
from plexrl.sim.results.bill import bill
from plexrl.sim.results.bounds import DrainBound
from plexrl.sim.results.gpu_hours import GpuHours, Tail, tail_of
from plexrl.sim.results.result import SimResult, Span, Speed
from plexrl.sim.workload.scenario import Scenario
from plexrl.traces import TraceJob

SPANS_MAX = 5000

ROUNDING_S = 1e-6
"""A job that waits this much longer than it accepts has only rounding errors."""

COMPLETED = "completed"

RunKind = Literal["run", "rollout", "load", "offload"]


@dataclass(slots=True, kw_only=True)
class _LiveJob:
    """A job that has not ended."""

    job: TraceJob
    submitted_at: float
    tenant: TenantSums
    details: JobDetails | None
    """Absent unless a row is wanted."""
    placed_at: float | None = None
    busy_gpu_s: float = 0.0
    took_s: float = 0.0
    """Duration of its cycles."""
    waited_s: float = 0.0
    """Time that its cycles took beyond the same cycles on a group of its own."""


class Collector:
    """Receives what happens in a run; `now` is in seconds on the virtual clock."""

    def __init__(
        self,
        scenario: Scenario,
        on_job: Callable[[JobRow], None] | None = None,
        kept: KeptGpus | None = None,
    ) -> None:
        """`on_job` receives the row of each job that ends. Without `kept` no GPUs are counted as
        kept for a job."""
        self._kept = kept
        self._scenario = scenario
        self._on_job = on_job
        self._jobs: dict[str, _LiveJob] = {}
        self._tenants = TenantTable()
        self._bound = DrainBound(_gpus_by_type(scenario))
        self._prices = {pool.node_type.name: pool.node_type.price for pool in scenario.pools}
        speeds = [pool.node_type.speed for pool in scenario.pools]
        self._fastest = min(speeds) / max(speeds)
        """Lower bound of a job's time on the fastest nodes, relative to the nodes it ran on: for
        the bounds of a cluster with several node types."""
        self._wait = Sketch()
        self._normalized_wait = Sketch()
        self._job_slowdown = Sketch()
        self._completion = Sketch()
        self._cycle_slowdown = Sketch()
        self._cycles = 0
        self._ended = 0
        self._failed_jobs = 0
        self._jobs_over_slo = 0
        self._drain_s = 0.0
        self._busy_gpu_s = 0.0
        self._switch_gpu_s = 0.0
        self._filled_gpu_s = 0.0
        self._rollout_gpu_s = 0.0
        self._rollout_gpus = 0
        """Rollout GPUs of the jobs that run now."""
        self._rollout_gpus_peak = 0
        self._rollout_cost = 0.0
        self._groups: dict[str, tuple[int, float]] = {}
        """GPUs and start time of each live group."""
        self._rollout_groups: set[str] = set()
        """Groups of rollouts."""
        self._last_placed_at = 0.0
        self._rollout_work_gpu_s = 0.0
        self._used_gpu_s = {True: 0.0, False: 0.0}
        """GPU-seconds of runs, moves and fillers in groups of rollouts and in others."""
        self._grouped_gpu_s = 0.0
        """GPU-seconds of the training groups that have ended."""
        self._held_nodes = HeldNodes()
        self._grouped = Series()
        self._trains = Series()
        self._unbilled: dict[str, tuple[TenantSums, float]] = {}
        """By group: tenant and GPU-seconds of its last offload, until the next load shows which
        job caused it."""
        self._window = scenario.window_s
        self._spans: list[Span] = []
        self._spans_left_out = 0
        self._failures = 0

    def job_submitted(self, job: TraceJob, now: float) -> None:
        """Record the submission of a job."""
        tenant = self._tenants.of(job.tenant)
        tenant.live += 1
        details = None if self._on_job is None else JobDetails()
        self._jobs[job.job_id] = _LiveJob(job=job, submitted_at=now, tenant=tenant, details=details)

    def job_placed(self, job_id: str, now: float) -> None:
        """Record the placement of a job; only its first placement counts."""
        job = self._jobs[job_id]
        if job.placed_at is None:
            job.placed_at = now
            self._last_placed_at = max(self._last_placed_at, now)
            self._rollout_gpus += job.job.rollout_gpus
            self._rollout_gpus_peak = max(self._rollout_gpus_peak, self._rollout_gpus)

    def job_ended(
        self,
        job_id: str,
        now: float,
        outcome: str,
        alone_s: float,
        busy_gpu_s: float | None = None,
    ) -> None:
        """Record the end of a job. Only jobs with `outcome` `completed` count in the distributions
        and the bounds. `alone_s`: duration of its drawn cycles on GPUs of its own, without moves of
        its state; `busy_gpu_s`: training work of these cycles (absent: of all its runs, repetitions
        included)."""
        live = self._jobs.pop(job_id)
        if self._on_job is not None and live.details is not None:
            self._on_job(
                live.details.row(
                    live.job,
                    submitted_at=live.submitted_at,
                    placed_at=live.placed_at,
                    ended_at=now,
                    outcome=outcome,
                    alone_s=alone_s,
                    busy_gpu_s=live.busy_gpu_s,
                )
            )
        job, tenant = live.job, live.tenant
        tenant.live -= 1
        tenant.ended += 1
        self._ended += 1
        self._drain_s = max(self._drain_s, now)
        if live.placed_at is not None and job.rollout_gpus:
            self._rollout_gpus -= job.rollout_gpus
            rollout_gpu_s = job.rollout_gpus * (now - live.placed_at)
            tenant.rollout_gpu_s += rollout_gpu_s
            if not self._scenario.places_rollouts:
                self._rollout_gpu_s += rollout_gpu_s
                self._rollout_cost += self._rollout_price(job) * rollout_gpu_s / HOUR_S
        if outcome != COMPLETED:
            self._failed_jobs += 1
            return
        assert live.placed_at is not None, f"{job_id} completed without having been placed"
        self._jobs_over_slo += live.waited_s > self._slo_of(job) * live.took_s + ROUNDING_S
        work = live.busy_gpu_s if busy_gpu_s is None else busy_gpu_s
        fastest = 1.0 if job.node_type in self._prices else self._fastest
        self._bound.add(live.submitted_at, alone_s * fastest, work * fastest, job.node_type)
        wait_s = live.placed_at - live.submitted_at
        tenant.completed += 1
        tenant.wait_s += wait_s
        self._wait.add(wait_s)
        if alone_s > 0:
            completion = (now - live.submitted_at) / alone_s
            tenant.slowdown += completion
            self._normalized_wait.add(wait_s / alone_s)
            self._job_slowdown.add((now - live.placed_at) / alone_s - 1)
            self._completion.add(completion)

    def cycle_ended(self, job_id: str, took_s: float, alone_s: float, waited_s: float) -> None:
        """Record a cycle; `alone_s`: duration of the same drawn cycle on a group of its own,
        without moves of state; `waited_s`: what it took longer because of other jobs."""
        slowdown = took_s / alone_s - 1
        self._cycles += 1
        self._cycle_slowdown.add(slowdown)
        live = self._jobs[job_id]
        live.took_s += took_s
        live.waited_s += waited_s
        details = live.details
        if details is not None:
            details.cycle_ended(slowdown)

    def switched(self, job_id: str) -> None:
        """Record that a job's state was offloaded for another job."""
        details = self._jobs[job_id].details
        if details is not None:
            details.switches += 1

    def ran(
        self,
        group: str,
        job_id: str,
        gpus: int,
        kind: RunKind,
        start_s: float,
        end_s: float,
        rollout_part: float = 0.0,
    ) -> None:
        """Record a completed or interrupted run of a job on a group, of whose GPUs rollouts took
        the part `rollout_part` first.

        An offload is billed to the job that is loaded next, as in the scheduler, or to the job
        itself if there is none. Runs of a job that has ended are billed to nobody.
        """
        held = gpus * (end_s - start_s)
        self._use(held, rollout_part)
        job = self._jobs.get(job_id)
        if job is not None and job.details is not None:
            job.details.ran(group)
            if kind != "run":
                job.details.move_gpu_s += held
        if kind == "rollout":
            # Tenants pay for the time for which their jobs hold rollout GPUs.
            self._busy_gpu_s += held
            self._rollout_work_gpu_s += held
            self._trains.add(start_s, end_s, gpus)
        elif kind == "run":
            self._busy_gpu_s += held
            self._trains.add(start_s, end_s, gpus)
            if group in self._unbilled:
                # The state is still on the GPUs: the offload was a snapshot.
                self._bill_itself(group)
            if job is not None:
                job.busy_gpu_s += held
                job.tenant.gpu_s += held
        else:
            self._switch_gpu_s += held
            self._bill_move(group, job, kind, held)
        window = self._window
        if window is not None and start_s < window[1] and end_s > window[0]:
            if len(self._spans) < SPANS_MAX:
                self._spans.append(
                    Span(group=group, job=job_id, kind=kind, start_s=start_s, end_s=end_s)
                )
            else:
                self._spans_left_out += 1

    def group_made(self, group: str, gpus: int, now: float, *, rolls_out: bool = False) -> None:
        """Record a new group with so many GPUs; `rolls_out`: its first member generates."""
        self._groups[group] = gpus, now
        if rolls_out:
            self._rollout_groups.add(group)

    def nodes_taken(self, deployment: str, nodes: Sequence[str], now: float) -> None:
        """Record the nodes that a deployment has now, each named once."""
        self._held_nodes.take(deployment, nodes, now)

    def group_gone(self, group: str, gpus: int, now: float) -> None:
        """Record the end of a group, or of so many of its GPUs."""
        made_with, since = self._groups.pop(group)
        assert gpus <= made_with, f"{group} had {made_with} GPUs but releases {gpus}"
        if gpus < made_with:
            self._groups[group] = made_with - gpus, since
        else:
            self._bill_itself(group)
        if group in self._rollout_groups:
            self._rollout_gpu_s += gpus * (now - since)
        else:
            self._grouped_gpu_s += gpus * (now - since)
        self._grouped.add(since, now, gpus)

    def filled(self, gpu_s: float, rollout_part: float) -> None:
        """Record useful generation in idle time, on GPUs of which rollouts took the part
        `rollout_part` first."""
        self._filled_gpu_s += gpu_s
        self._use(gpu_s, rollout_part)

    def failed(self) -> None:
        """Record the loss of a node or a worker."""
        self._failures += 1

    def result(self, now: float, events: int, switches: int, speed: Speed) -> SimResult:
        """The result of the run; no more records may follow."""
        for group, (gpus, _) in list(self._groups.items()):
            self.group_gone(group, gpus, now)
        for group in list(self._unbilled):
            self._bill_itself(group)
        grouped_hours = self._grouped_gpu_s / HOUR_S
        rollout_hours = self._rollout_gpu_s / HOUR_S
        rollout_cost = self._rollout_cost
        if self._scenario.prices.rollout is not None:
            rollout_cost = rollout_hours * self._scenario.prices.rollout
        nodes_held = self._held_nodes.hours()
        billed = bill(
            self._scenario,
            drain_s=self._drain_s,
            nodes_held=nodes_held,
            rollout_cost=rollout_cost,
        )
        utilisation = self._utilisation(now)
        tail = tail_of(utilisation, self._drain_s, self._last_placed_at)
        per_cycle = (grouped_hours + rollout_hours) / self._cycles if self._cycles else 0.0
        return SimResult(
            policy=self._scenario.policy,
            gpus=self._scenario.gpus,
            places_rollouts=self._scenario.places_rollouts,
            jobs=self._ended,
            failed_jobs=self._failed_jobs,
            jobs_over_slo=self._jobs_over_slo,
            cycles=self._cycles,
            events=events,
            switches=switches,
            drain_s=self._drain_s,
            bounds=self._bound.bounds(),
            wait=self._wait.distribution(),
            normalized_wait=self._normalized_wait.distribution(),
            job_slowdown=self._job_slowdown.distribution(),
            completion=self._completion.distribution(),
            cycle_slowdown=self._cycle_slowdown.distribution(),
            training_gpu_hours=grouped_hours,
            busy_gpu_hours=self._busy_gpu_s / HOUR_S,
            switch_gpu_hours=self._switch_gpu_s / HOUR_S,
            filled_gpu_hours=self._filled_gpu_s / HOUR_S,
            rollout_gpu_hours=rollout_hours,
            rollout_gpus_peak=self._rollout_gpus_peak,
            cost=billed.cost,
            rollout_cost=billed.rollout_cost,
            on_demand_cost=billed.on_demand_cost,
            reserved_nodes=billed.reserved_nodes,
            paid_s=billed.paid_s,
            nodes_held=nodes_held,
            gpu_hours_per_cycle=per_cycle,
            where=self._where(tail),
            tail=tail,
            utilisation=utilisation,
            tenants=self._tenants.results(),
            worst_tenant=self._tenants.worst(),
            spans=tuple(self._spans),
            spans_left_out=self._spans_left_out,
            failures=self._failures,
            speed=speed,
        )

    def _use(self, gpu_s: float, rollout_part: float) -> None:
        self._used_gpu_s[True] += rollout_part * gpu_s
        self._used_gpu_s[False] += gpu_s - rollout_part * gpu_s

    def _where(self, tail: Tail) -> GpuHours:
        """GPU-hours by state of the GPU. A GPU that is held and does not work is idle, and one that
        is not held is unallocated, so the parts sum to all GPU-hours."""
        placed_gpu_s = self._rollout_gpu_s if self._scenario.places_rollouts else 0.0
        total_gpu_s = self._scenario.gpus * self._drain_s
        unallocated = (total_gpu_s - self._grouped_gpu_s - placed_gpu_s) / HOUR_S
        training_idle_gpu_s = self._grouped_gpu_s - self._used_gpu_s[False]
        kept_gpu_s = 0.0 if self._kept is None else self._kept.gpu_seconds(self._drain_s)
        in_tail = (1.0 - tail.held) * self._scenario.gpus * tail.seconds / HOUR_S
        return GpuHours(
            rollouts_work=self._rollout_work_gpu_s / HOUR_S,
            training_works=(self._busy_gpu_s - self._rollout_work_gpu_s) / HOUR_S,
            switches=self._switch_gpu_s / HOUR_S,
            filled=self._filled_gpu_s / HOUR_S,
            rollout_gpus_idle=(placed_gpu_s - self._used_gpu_s[True]) / HOUR_S,
            training_gpus_idle=training_idle_gpu_s / HOUR_S,
            unallocated=unallocated,
            unallocated_tail=min(in_tail, unallocated),
            unallocated_kept=min(kept_gpu_s / HOUR_S, unallocated),
        )

    def _bill_move(self, group: str, job: _LiveJob | None, kind: RunKind, held: float) -> None:
        if kind == "offload":
            if group in self._unbilled:
                self._bill_itself(group)
            if job is not None:
                self._unbilled[group] = job.tenant, held
        elif job is not None:
            _, offload = self._unbilled.pop(group, (job.tenant, 0.0))
            job.tenant.gpu_s += held + offload

    def _bill_itself(self, group: str) -> None:
        if group in self._unbilled:
            tenant, held = self._unbilled.pop(group)
            tenant.gpu_s += held

    def _utilisation(self, now: float) -> tuple[tuple[float, float, float], ...]:
        grouped, trains = self._grouped, self._trains
        for series, other in ((grouped, trains), (trains, grouped)):
            series.reach(max(now, other.end_s))
        gpus = self._scenario.gpus
        return tuple(
            (start_s, held / gpus, training / gpus)
            for (start_s, held), (_, training) in zip(
                grouped.levels(now), trains.levels(now), strict=True
            )
        )

    def _slo_of(self, job: TraceJob) -> float:
        """The greatest part of its time that the job accepts to wait."""
        own = job.slo if self._scenario.slo is None else self._scenario.slo
        return WAITING_PART_MAX if own is None else own

    def _rollout_price(self, job: TraceJob) -> float:
        """Price of a rollout GPU-hour: of the job's node type, else of the cluster's first type."""
        first = self._scenario.pools[0].node_type.price
        return self._prices.get(job.node_type, first)


def _gpus_by_type(scenario: Scenario) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for pool in scenario.pools:
        name = pool.node_type.name
        found[name] = found.get(name, 0) + pool.nodes * pool.node_type.gpus
    return found
