"""Lists the jobs that hold the GPUs a job waits for, idle ones first."""

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from plexrl.ids import JobId, TenantId
from plexrl.scheduler.jobs.lifecycle import cancelled_without_controller_at, heard_at
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.queries.explain_placement import why_no_gpus
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Job, State
from plexrl.wire.messages.views import HolderView

HOLDERS_MAX = 20
"""Maximum number of jobs in the list."""


class GpuUse(StrEnum):
    """What a job does with its GPUs, most dispensable first."""

    DETACHED = "detached"
    """Its controller is considered gone; the job is cancelled unless a controller attaches."""
    SILENT = "silent"
    """Its controller was silent for half of the timeout."""
    IDLE = "idle"
    """Its controller is alive, and has nothing to run."""
    WORKING = "working"


_ORDER = tuple(GpuUse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A job that holds GPUs."""

    job: JobId | None
    """None, as are `tenant` and `name`: hidden from other tenants."""
    tenant: TenantId | None
    name: str | None
    gpus: int
    """GPUs that a waiting deployment could use."""
    condition: GpuUse
    silent_s: float
    """Time since the last message of the controller."""
    idle_s: float | None
    """Time since it last worked; None while it works."""
    cancelled_in_s: float | None
    """Time until it is cancelled if its controller stays silent; None otherwise."""


def holders(cluster: Cluster, job: Job, now: float, *, sees_all: bool) -> list[HolderView]:
    """The jobs with GPUs that a waiting deployment of `job` could use; if it waits for a quota, the
    jobs of its tenant. Only an operator (`sees_all`) sees the identity of other tenants' jobs."""
    waiting = [
        each
        for each in map(cluster.state.deployment, job.deployments)
        if each.wpg.state == WpgState.WAITING
    ]
    gpus: dict[JobId, int] = {}
    for deployment in waiting:
        for name, count in _suitable(cluster, deployment, now).items():
            gpus[name] = max(count, gpus.get(name, 0))
    rows = [
        _holder(cluster.state, cluster.state.job(name), count, now) for name, count in gpus.items()
    ]
    rows.sort(key=_dispensable_first)
    shown = [
        row
        if sees_all or row.tenant == job.tenant
        else replace(row, job=None, tenant=None, name=None)
        for row in rows[:HOLDERS_MAX]
    ]
    return [msgspec.to_builtins(row) for row in shown]


def _suitable(cluster: Cluster, waiting: Deployment, now: float) -> dict[JobId, int]:
    """GPUs of each other job that the deployment could use if they became free."""
    state = cluster.state
    _, rule, _ = why_no_gpus(cluster, waiting, now, sees_all=False)
    if rule not in ("capacity", "turn", "memory", "quota", "reservation"):
        return {}
    tenant = state.job(waiting.job).tenant
    found: dict[JobId, int] = {}
    for group in state.groups.values():
        if rule != "quota" and waiting.spec.node_type not in ("", group.node_type):
            continue
        for name in group.members:
            member = state.deployment(name)
            if member.job == waiting.job:
                continue
            if rule != "quota" or state.job(member.job).tenant == tenant:
                found[member.job] = found.get(member.job, 0) + member.spec.workers
    return found


def _holder(state: State, job: Job, gpus: int, now: float) -> Holder:
    deployments = [state.deployment(name) for name in job.deployments]
    works = any(
        bool(deployment.work.queue or deployment.work.running or deployment.wpg.moving)
        for deployment in deployments
    )
    silent_s = now - (heard_at(state, job) if job.attached else job.seen_at)
    if not job.attached:
        condition = GpuUse.DETACHED
    elif silent_s > job.controller_timeout_s / 2:
        condition = GpuUse.SILENT
    else:
        condition = GpuUse.WORKING if works else GpuUse.IDLE
    worked_at = max(
        [_worked_at(deployment) for deployment in deployments], default=job.submitted_at
    )
    end_s = cancelled_without_controller_at(job) - now
    if job.attached:
        end_s = max(end_s, job.controller_timeout_s - silent_s)
    is_leaving = condition in (GpuUse.DETACHED, GpuUse.SILENT)
    return Holder(
        job=job.job,
        tenant=job.tenant,
        name=job.name,
        gpus=gpus,
        condition=condition,
        silent_s=silent_s,
        idle_s=None if works else now - worked_at,
        cancelled_in_s=max(0.0, end_s) if is_leaving else None,
    )


def _worked_at(deployment: Deployment) -> float:
    """When the deployment last worked, or could first have worked."""
    metered_at = deployment.demand.metered_at if deployment.demand.metered_at is not None else 0.0
    return max(
        deployment.created_at,
        deployment.wpg.processes.ready_at,
        deployment.demand.burst.served_at,
        metered_at,
    )


def _dispensable_first(row: Holder) -> tuple[int, float, float, str]:
    return (
        _ORDER.index(row.condition),
        -(row.idle_s or 0.0),
        -row.silent_s,
        row.job or "",
    )
