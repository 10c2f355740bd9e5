"""A plan of the cluster: what a simulation of its next hours needs to know. Pure.

For each live job: its GPUs, its demand as measured, and how long it still takes alone. A plan has
no keys, models or operations, so it is small, and it may leave the scheduler. It describes a job by
one training and one rollout; the GPUs of references and judges count with those of the rollout.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal

from plexrl.errors import InvalidRequestError
from plexrl.ids import JobId, TenantId
from plexrl.scheduler.accounting.earlier_jobs import expect_as_before, usual_length
from plexrl.scheduler.accounting.tenants import check_budget, check_live_jobs, check_priority
from plexrl.scheduler.admission.queues.expected_ends import left_alone_s
from plexrl.scheduler.jobs.deployments import new_deployment, requested_spec
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.rules.config import planning
from plexrl.scheduler.rules.lookups import find_job
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages.calls import ReadPlan
from plexrl.scheduler.state.records import Deployment, Job, Node, State
from plexrl.scheduler.state.tenant import Tenant

JOBS_PER_STEP: Final = 50
"""A step over so many jobs takes about a millisecond."""

Rollouts = Literal["own", "shared"]
Knowledge = Literal["measured", "like others", "declared", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNodes:
    """Equal nodes that take work."""

    nodes: int
    node_type: str
    gpus: int
    gpu_memory_bytes: int
    host_memory_bytes: int
    nvme_bytes: int
    is_virtual: bool
    """They have no real GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTenant:
    """A tenant that has live jobs, and its quotas."""

    tenant: TenantId
    weight: float
    jobs_max: int | None
    gpus_max: int | None
    priority_max: int
    is_operator: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedJob:
    """A live job, or one that may be submitted."""

    job: JobId
    tenant: TenantId
    name: str
    priority: int
    slo: float | None
    has_gpus: bool
    waited_s: float
    """Since its submission, if it has no GPUs."""
    gpus: int
    rollout_gpus: int
    rollouts: Rollouts
    """Whether the rollout's GPUs are its own."""
    node_type: str
    state_bytes: int
    knowledge: Knowledge
    """Where the demand is from."""
    left_s: float
    """Seconds that it still takes without others on its GPUs; 0: unknown."""
    period_s: float | None
    """Of a cycle; None: the demand is unknown, as if it always worked."""
    jitter_s: float = 0.0
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The cluster, and the job that is asked about."""

    now: float
    settings: dict[str, str | int | float | bool | None]
    nodes: tuple[PlannedNodes, ...]
    tenants: tuple[PlannedTenant, ...]
    jobs: tuple[ProjectedJob, ...]
    """Those with GPUs first, by the time at which they got them; then by submission."""
    asked: ProjectedJob
    start_errors: tuple[float, ...] = ()
    """Errors of the tenant's earlier quotes, oldest first (`jobs.quoted_jobs`)."""
    end_errors: tuple[float, ...] = ()


def cluster_plan(
    cluster: Cluster,
    tenant: TenantId,
    call: ReadPlan,
    now: float,
    jobs: Sequence[ProjectedJob] | None = None,
) -> ClusterPlan:
    """The plan with the job that `call` describes. Nothing is changed. `jobs`: the live ones, if
    they were read in steps.

    Raises:
        InvalidRequestError: the job has no deployments, or nothing is known of its demand or
            its length.
        UnknownJobError: there is no job to be like.
        PlexRLError: a limit of the tenant, as when the job is submitted.
    """
    check_priority(cluster.state, tenant, call.priority)
    check_budget(cluster.holdings, tenant, now)
    check_live_jobs(cluster.holdings, cluster.settings, tenant)
    asked = _asked(cluster, tenant, call, now)
    owner = cluster.state.tenants.get(tenant)
    return ClusterPlan(
        now=now,
        settings=planning(cluster.settings.config),
        nodes=_pools(cluster.state),
        tenants=tuple(map(_tenant, cluster.state.tenants.values())),
        jobs=live_jobs(cluster.state, now) if jobs is None else tuple(jobs),
        asked=asked,
        start_errors=() if owner is None else tuple(owner.quoted_starts),
        end_errors=() if owner is None else tuple(owner.quoted_ends),
    )


class LiveJobsReader:
    """One reading of all live jobs that have or wait for GPUs: all `steps`, then `jobs`."""

    def __init__(self, state: State) -> None:
        live = [job for job in state.jobs.values() if _is_planned(state, job)]
        live.sort(
            key=lambda job: (job.placed_at is None, job.placed_at or job.submitted_at, job.serial)
        )
        self._names = [job.job for job in live]
        self.jobs: list[ProjectedJob] = []

    def steps(self, state: Callable[[], State], now: float) -> Iterator[None]:
        """Read; `state` returns the present one. Between two steps jobs may end."""
        for at in range(0, len(self._names), JOBS_PER_STEP):
            present = state()
            for name in self._names[at : at + JOBS_PER_STEP]:
                job = present.jobs.get(name)
                if job is not None and _is_planned(present, job):
                    self.jobs.append(_live(present, job, now))
            yield


def live_jobs(state: State, now: float) -> tuple[ProjectedJob, ...]:
    """The live jobs, read at once."""
    reader = LiveJobsReader(state)
    for _ in reader.steps(lambda: state, now):
        pass
    return tuple(reader.jobs)


def _is_planned(state: State, job: Job) -> bool:
    """Whether it has or waits for GPUs: what uses the idle time of others alone does not."""
    if job.state.is_final or job.is_set_aside:
        return False
    return any(not state.deployment(name).spec.preemptible for name in job.deployments)


def _live(state: State, job: Job, now: float) -> ProjectedJob:
    planned = _planned(job, [state.deployment(name) for name in job.deployments], now)
    period_s = 1.0 if planned.period_s is None else planned.period_s
    return replace(planned, left_s=left_alone_s(state, job, period_s, now))


def _planned(job: Job, deployments: Sequence[Deployment], now: float) -> ProjectedJob:
    """The job, of unknown length."""
    lasting = [each for each in deployments if not each.spec.preemptible]
    if not lasting:
        raise InvalidRequestError(f"job {job.job!r} has no deployment that gets GPUs of its own")
    main = max(lasting, key=lambda each: (each.spec.kind == "train", each.spec.workers))
    others = [each for each in lasting if each is not main]
    trace = main.demand.trace
    shared = any(each.spec.may_share for each in others if each.spec.kind == "rollout")
    return ProjectedJob(
        job=job.job,
        tenant=job.tenant,
        name=job.name,
        priority=job.priority,
        slo=0.0 if main.spec.exclusive else job.slo,
        has_gpus=job.placed_at is not None,
        waited_s=0.0 if job.placed_at is not None else now - job.submitted_at,
        gpus=main.spec.workers,
        rollout_gpus=sum(each.spec.workers for each in others),
        rollouts="shared" if shared else "own",
        node_type=main.spec.node_type,
        state_bytes=main.spec.state_bytes,
        knowledge=_knowledge(main, trace),
        left_s=0.0,
        period_s=None if trace is None else trace.period_s,
        jitter_s=0.0 if trace is None else trace.jitter_s,
        segments=() if trace is None else trace.segments,
    )


def _knowledge(deployment: Deployment, trace: DemandTrace | None) -> Knowledge:
    if trace is None:
        return "unknown"
    if deployment.demand.has_prior:
        return "like others"
    return "measured" if trace.cycles else "declared"


def _asked(cluster: Cluster, tenant: TenantId, call: ReadPlan, now: float) -> ProjectedJob:
    planned = _described(cluster, tenant, call, now)
    left_s = call.expected_s or usual_length(cluster, tenant, call.name)
    if call.steps and planned.period_s is not None:
        left_s = call.steps * planned.period_s
    if not left_s:
        raise InvalidRequestError(
            f"nothing is known of the cycles of {planned.name!r}: no earlier job is like it. Say "
            "how long it takes (expected_s), give its demand (trace), or name a job that it is like"
        )
    return replace(
        planned, tenant=tenant, priority=call.priority, slo=_slo(call, planned), left_s=left_s
    )


def _slo(call: ReadPlan, planned: ProjectedJob) -> float | None:
    return planned.slo if call.slo is None else call.slo


def _described(cluster: Cluster, tenant: TenantId, call: ReadPlan, now: float) -> ProjectedJob:
    """The job by its row, by the job that it is like, or by its deployments."""
    if call.row is not None:
        return _of_row(tenant, call)
    if call.like is not None:
        job = find_job(cluster.state, call.like)
        names = [*job.deployments, *job.ended_deployments]
        planned = _planned(job, [cluster.state.deployment(name) for name in names], now)
        return replace(planned, has_gpus=False, waited_s=0.0)
    return _declared(cluster, tenant, call, now)


def _of_row(tenant: TenantId, call: ReadPlan) -> ProjectedJob:
    row = call.row
    assert row is not None, "the call has a row"
    return ProjectedJob(
        job=JobId("asked"),
        tenant=tenant,
        name=call.name,
        priority=call.priority,
        slo=call.slo,
        has_gpus=False,
        waited_s=0.0,
        gpus=row.gpus,
        rollout_gpus=row.rollout_gpus,
        rollouts="own",
        node_type=row.node_type,
        state_bytes=row.state_bytes,
        knowledge="unknown" if row.trace is None else "declared",
        left_s=0.0,
        period_s=None if row.trace is None else row.trace.period_s,
        jitter_s=0.0 if row.trace is None else row.trace.jitter_s,
        segments=() if row.trace is None else row.trace.segments,
    )


def _declared(cluster: Situation, tenant: TenantId, call: ReadPlan, now: float) -> ProjectedJob:
    job = Job(
        job=JobId("asked"),
        tenant=tenant,
        name=call.name,
        controller_timeout_s=1.0,
        reattach_timeout_s=1.0,
        submitted_at=now,
        seen_at=now,
        priority=call.priority,
        slo=call.slo,
    )
    found = []
    for event in call.deployments:
        deployment = new_deployment(event, requested_spec(event, job), now)
        if deployment.demand.trace is None:
            expect_as_before(cluster, job, deployment)
        found.append(deployment)
    return _planned(job, found, now)


def _tenant(tenant: Tenant) -> PlannedTenant:
    return PlannedTenant(
        tenant=tenant.tenant,
        weight=tenant.weight,
        jobs_max=tenant.jobs_max,
        gpus_max=tenant.gpus_max,
        priority_max=tenant.priority_max,
        is_operator=tenant.is_operator,
    )


def _pools(state: State) -> tuple[PlannedNodes, ...]:
    """The nodes that take work, equal ones together."""
    usable = [node for node in state.nodes.values() if node.alive and not node.is_draining]
    found = sorted(map(_sizes, usable), key=repr)
    return tuple(replace(size, nodes=len(list(alike))) for size, alike in groupby(found))


def _sizes(node: Node) -> PlannedNodes:
    return PlannedNodes(
        nodes=1,
        node_type=node.node_type,
        gpus=node.gpus,
        gpu_memory_bytes=node.gpu_memory_bytes,
        host_memory_bytes=node.host_memory_bytes,
        nvme_bytes=node.nvme_bytes,
        is_virtual=not node.gpu_kind,
    )
