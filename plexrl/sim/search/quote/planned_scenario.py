"""Makes the plan of a live cluster into jobs of a simulation. Pure.

Simulated time 0 lies `before_s` before the present, so that jobs that have waited keep their age in
the order of admission. Nothing works before the present: a job that has GPUs then continues its
cycle at a random point.

Where the simulation departs from the cluster: jobs are placed anew, in the order in which they
were; a job has one training and one rollout (`ProjectedJob`); rollouts share their GPUs where they
are scarce, or none does; moves of state take as long as on the modelled nodes; and nobody submits
another job.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from plexrl.ids import TenantId
from plexrl.scheduler.queries.overview.planned_jobs import (
    ClusterPlan,
    PlannedNodes,
    PlannedTenant,
    ProjectedJob,
)
from plexrl.scheduler.rules.limits import PRIORITY_MAX
from plexrl.scheduler.state.messages.events import TenantConfigured
from plexrl.sim.workload.counter_rng import stream, uniform
from plexrl.sim.workload.cycles import CycleDistribution, CycleFactory, CycleSource, DrawnCycle
from plexrl.sim.workload.scenario import Behaviour, Detail, NodeType, Pool, RolloutGpus, Scenario
from plexrl.traces import TraceJob
from plexrl.traces.schema import TraceSegment

BEFORE_S_MAX = 21_600.0
"""Longest age that a waiting job keeps: past the starvation bound it changes no order."""
LAUNCH_S = 30.0
VIRTUAL_LAUNCH_S = 5.0
"""Workers of virtual GPUs load a small model."""
MOVE_RATES = {"host_bytes_per_s": 5e9, "move_fixed_s": 0.05}
"""Of virtual GPUs, which are memory of the host."""
SLO_MAX = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFuture:
    """A scenario that begins before the present."""

    scenario: Scenario
    before_s: float
    """The present, on the clock of the simulation."""
    tenants: tuple[TenantConfigured, ...]
    names: tuple[str, ...]
    """Live jobs that take part, by their names in the simulation."""


@dataclass(frozen=True, slots=True)
class _Rows:
    rows: tuple[TraceJob, ...]

    def jobs(self) -> Iterator[TraceJob]:
        return iter(self.rows)


class ResumedCycles:
    """The cycles of a job that does nothing before the present. The first cycle is drawn when its
    rollout begins; `part` of the rollout is then left."""

    __slots__ = ("_clock", "_first", "_now_s", "_part", "_source", "functions")

    def __init__(
        self, source: CycleSource, now_s: float, clock: Callable[[], float], part: float
    ) -> None:
        self._source = source
        self._now_s = now_s
        self._clock = clock
        self._part = part
        self._first: DrawnCycle | None = None
        self.functions = source.functions

    def draw(self, number: int) -> DrawnCycle:
        """The `number`-th cycle; repeated calls return equal cycles."""
        if number:
            return self._source.draw(number)
        if self._first is None:
            drawn = self._source.draw(0)
            idle_s = max(0.0, self._now_s - self._clock())
            self._first = drawn._replace(rollout_s=idle_s + self._part * drawn.rollout_s)
        return self._first


def future_of(
    plan: ClusterPlan, asked: Sequence[ProjectedJob], seed: int, *, later_s: float = 0.0
) -> PlannedFuture:
    """The future of the plan's live jobs and of those `asked`, submitted `later_s` from now."""
    before_s = max(launch_s(plan), min(BEFORE_S_MAX, max(_ages(plan), default=0.0)))
    live = [_row(job, before_s, number) for number, job in enumerate(plan.jobs)]
    new = [_row(job, before_s + later_s, -1) for job in asked]
    rows = sorted([*live, *new], key=lambda row: row.submit_s)
    scenario = Scenario(
        source=_Rows(tuple(rows)),
        pools=pools_of(plan.nodes),
        seed=seed,
        rollouts=_rollouts([*plan.jobs, *asked]),
        launch_s=launch_s(plan),
        detail="burst",
    )
    return PlannedFuture(
        scenario=scenario,
        before_s=before_s,
        tenants=tuple(map(_configured, plan.tenants)),
        names=tuple(row.job_id for row in live),
    )


def cycles_from_now(future: PlannedFuture, clock: Callable[[], float]) -> CycleFactory:
    """The cycle factory of a run of this future, which has this clock."""
    live = set(future.names)

    def cycles_of(
        job: TraceJob, behaviour: Behaviour, seed: int, *, detail: Detail
    ) -> ResumedCycles:
        source = CycleDistribution(job, behaviour, seed, detail=detail)
        has_begun = job.job_id in live and job.submit_s == 0.0
        part = uniform(stream(seed, "resumed", job.job_id), 0) if has_begun else 1.0
        return ResumedCycles(source, future.before_s, clock, part)

    return cycles_of


def launch_s(plan: ClusterPlan) -> float:
    """Seconds that workers take to start."""
    return VIRTUAL_LAUNCH_S if all(node.is_virtual for node in plan.nodes) else LAUNCH_S


def pools_of(nodes: Sequence[PlannedNodes]) -> tuple[Pool, ...]:
    """The pools of these nodes; a second kind of the same type gets another name."""
    seen: dict[str, int] = {}
    pools = []
    for each in nodes:
        name = each.node_type or "node"
        seen[name] = seen.get(name, 0) + 1
        is_first = seen[name] == 1
        pools.append(_pool(each, name if is_first else f"{name} ({seen[name]})"))
    return tuple(pools)


def _pool(each: PlannedNodes, name: str) -> Pool:
    rates = MOVE_RATES if each.is_virtual else {}
    kind = NodeType(
        name=name,
        gpus=each.gpus,
        gpu_memory_bytes=each.gpu_memory_bytes,
        host_memory_bytes=each.host_memory_bytes,
        nvme_bytes=each.nvme_bytes,
        **rates,
    )
    return Pool(nodes=each.nodes, node_type=kind)


def _ages(plan: ClusterPlan) -> list[float]:
    return [job.waited_s for job in plan.jobs if not job.has_gpus]


def _row(job: ProjectedJob, now_s: float, number: int) -> TraceJob:
    """The job as a row of a trace; `number` of a live one, -1: it is asked for."""
    submit_s = now_s
    if number >= 0:
        submit_s = 0.0 if job.has_gpus else max(0.0, now_s - job.waited_s)
    cycles = None if job.period_s is None else max(1, round(job.left_s / job.period_s))
    length_s = job.left_s if job.period_s is None or cycles is None else cycles * job.period_s
    idle_s = now_s if job.has_gpus else 0.0
    return TraceJob(
        job_id=f"{number}" if number >= 0 else ASKED,
        submit_s=submit_s,
        gpus=job.gpus,
        tenant=job.tenant,
        duration_s=length_s + (idle_s if cycles is not None else 0.0),
        cycles=cycles,
        rollout_gpus=job.rollout_gpus,
        node_type=job.node_type,
        state_bytes=job.state_bytes,
        period_s=job.period_s,
        jitter_s=job.jitter_s,
        segments=_segments(job),
        priority=job.priority,
        slo=None if job.slo is None else min(job.slo, SLO_MAX),
    )


ASKED = "asked"
"""The job that is asked about, among the jobs of a simulation; live ones have numbers."""


def _segments(job: ProjectedJob) -> tuple[TraceSegment, ...]:
    return tuple(
        TraceSegment(
            function="update",
            offset_s=segment.offset_s,
            duration_s=segment.duration_s,
            slack_s=segment.slack_s,
        )
        for segment in job.segments
    )


def _rollouts(jobs: Sequence[ProjectedJob]) -> RolloutGpus:
    with_gpus = [job for job in jobs if job.rollout_gpus]
    if not with_gpus:
        return "outside"
    return "automatic" if any(job.rollouts == "shared" for job in with_gpus) else "own"


def _configured(tenant: PlannedTenant) -> TenantConfigured:
    return TenantConfigured(
        tenant=TenantId(tenant.tenant),
        weight=tenant.weight,
        jobs_max=tenant.jobs_max,
        gpus_max=tenant.gpus_max,
        gpu_seconds_max=None,
        priority_max=PRIORITY_MAX,
    )
