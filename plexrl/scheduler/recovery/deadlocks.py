"""Deadlocks among jobs that hold GPUs for some deployments and wait for GPUs for others.

Job A and job B each hold half of the GPUs, and each waits for the other half. Neither ends, so
neither gets more. Controllers create their deployments one by one, so such a deadlock cannot be
prevented. It is detected and broken after each placement pass:

1. a job is *partial* if it holds GPUs and waits for more. It is *idle* if its deployments have
   started no operation, or none within `starvation_bound_s`. A job that works is not part of a
   deadlock, because it ends some day;
2. assume that all jobs except the idle partial ones ended now. An idle partial job that could then
   get all its GPUs is assumed to end too and to release what it holds, and so on. The jobs that
   remain are *stuck*;
3. of several stuck jobs one gives its GPUs back: a job that is impossible on the nodes in service,
   if there is one; otherwise the latest submission of the lowest class. A single stuck job waits
   for nodes that are not in service; it gives its GPUs back if others wait that could use them.
   Then the remaining jobs are checked again.

A job that gave its GPUs back loses no operation. It becomes a gang of all its deployments, so it
cannot hold and wait again.
"""

import math
from collections.abc import Sequence

from plexrl.ids import GroupId, JobId, TenantId
from plexrl.scheduler.accounting.quotas import allows_gpus, over_quota
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.needs import Need, need_of
from plexrl.scheduler.placement.capacity.node_pool import NodeKind
from plexrl.scheduler.placement.cluster import Cluster, Context
from plexrl.scheduler.placement.fit.feasibility import fit_as_placed, is_possible
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.recovery.evacuation import displace, may_displace
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.records import Deployment, Job, State

CHECK_EACH_S = 60.0
"""Partial jobs that work are checked again at multiples of this time."""


def break_deadlocks(context: Context, now: float) -> None:
    """Take GPUs from stuck jobs until no job is stuck, or no job would gain by it."""
    cluster = context.cluster
    if not cluster.queues.waiting.of_partial_jobs:
        return
    idle, check_at = _idle_partial_jobs(cluster.queues, now)
    for at in check_at:
        context.effects.wake(at, timers.PLACEMENT)
    while idle:
        stuck = _stuck(cluster, idle)
        if not stuck or (len(stuck) == 1 and not is_waited_for(cluster, stuck)):
            return
        job = min(stuck, key=lambda each: _victim_key(cluster, each))
        idle.remove(job)
        reason = "it held GPUs while it waited for GPUs that other such jobs held"
        job.gang = len(job.deployments)
        for deployment in placed_of(context.state, job):
            displace(context, deployment, reason, now)


def _idle_partial_jobs(queues: Queues, now: float) -> tuple[list[Job], list[float]]:
    """The idle partial jobs, and when to check each of the others again."""
    state = queues.state
    names = {state.deployment(name).job: None for name in queues.waiting.of_partial_jobs}
    found, check_at = [], []
    for name in names:
        job = state.job(name)
        placed = placed_of(state, job)
        if not placed:
            continue
        idle_at = max(_idle_at(queues.settings, each) for each in placed)
        if idle_at <= now and all(may_displace(queues, each) for each in placed):
            found.append(job)
        else:
            again_at = max(idle_at, now + CHECK_EACH_S) if math.isfinite(idle_at) else now
            # Rounded, so that many checks share one timer.
            check_at.append((again_at // CHECK_EACH_S + 1) * CHECK_EACH_S)
    return found, check_at


def placed_of(state: State, job: Job) -> list[Deployment]:
    """The job's deployments that have GPUs."""
    return [each for each in map(state.deployment, job.deployments) if each.has_gpus]


def _idle_at(settings: Settings, deployment: Deployment) -> float:
    """When a deployment becomes idle; infinite while it works."""
    if deployment.work.running or deployment.wpg.moving is not None:
        return math.inf
    if not deployment.demand.burst.served_at:
        return -math.inf
    return deployment.demand.burst.served_at + settings.config.starvation_bound_s


def _stuck(cluster: Cluster, idle: Sequence[Job]) -> list[Job]:
    """The idle partial jobs that could not get all their GPUs even if all other jobs ended."""
    left = {job.job: job for job in sorted(idle, key=lambda job: job.serial)}
    while True:
        free = _free_without(cluster.capacity, left)
        for name, job in left.items():
            waiting = [
                cluster.state.deployment(deployment)
                for deployment in job.deployments
                if deployment in cluster.queues.waiting
            ]
            if fit_as_placed(cluster.capacity, free, waiting) and _has_quota(
                cluster.state, job, waiting, left
            ):
                del left[name]
                break
        else:
            return list(left.values())


def _free_without(capacity: Capacity, holders: dict[JobId, Job]) -> dict[NodeKind, int]:
    """GPUs in service that none of these jobs holds, by kind."""
    free = dict(capacity.inventory.in_service())
    groups: dict[GroupId, None] = {}
    for job in holders.values():
        for deployment in placed_of(capacity.state, job):
            groups.update(dict.fromkeys(deployment.placement.groups))
    for name in groups:
        for kind, gpus in capacity.inventory.gpus_in_service(capacity.state.groups[name]).items():
            free[kind] -= gpus
    return free


def _has_quota(
    state: State, job: Job, waiting: Sequence[Deployment], holders: dict[JobId, Job]
) -> bool:
    """Whether the tenant's quota would allow the job all its GPUs, if all other jobs ended."""
    held = sum(
        each.spec.workers
        for other in holders.values()
        if other.tenant == job.tenant
        for each in placed_of(state, other)
    )
    return allows_gpus(state, job.tenant, held + sum(each.spec.workers for each in waiting))


def _victim_key(cluster: Cluster, job: Job) -> tuple[bool, int, int]:
    waiting = [deployment for deployment in job.deployments if deployment in cluster.queues.waiting]
    may_fit = all(is_possible(cluster, cluster.state.deployment(each)) for each in waiting)
    return may_fit, job.priority, -job.serial


def is_waited_for(cluster: Cluster, jobs: Sequence[Job]) -> bool:
    """Whether a job other than these waits that could get GPUs if some were free."""
    names = {job.job for job in jobs}
    refused: set[tuple[TenantId, Need]] = set()
    for name in cluster.queues.waiting:
        other = cluster.state.deployment(name)
        if other.job in names:
            continue
        owner = cluster.state.job(other.job)
        if len(owner.deployments) < owner.gang:
            continue
        # Many jobs may wait behind one quota: equal requests are checked once.
        request = (owner.tenant, need_of(other)) if len(owner.deployments) == 1 else None
        if request is not None and request in refused:
            continue
        if over_quota(cluster.holdings, owner, other.spec.workers) is None and is_possible(
            cluster, other
        ):
            return True
        if request is not None:
            refused.add(request)
    return False
