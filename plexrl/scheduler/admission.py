"""Who gets GPUs next: quotas, priorities, weighted fairness and response ratio (PlexRL §5.2.3).

The order of waiting deployments, first criterion first:

1. the job already has GPUs for another deployment (it holds them idle until it is whole);
2. it has waited beyond `starvation_bound_s`;
3. priority class;
4. its tenant's share: GPUs held and lately used, over its weight (least first);
5. response ratio of the wait to the job's expected length;
6. time of submission, then name.

A job that asked for a gang gets GPUs for all its deployments at once or for none. One that waits
beyond the starvation bound is passed by no other job that would take free GPUs.
"""

from collections.abc import Mapping

from plexrl.errors import CapacityError, ModelDoesNotFitError
from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.context import Context
from plexrl.scheduler.node_pool import NodeKind
from plexrl.scheduler.placement import leave, place, shares
from plexrl.scheduler.state import Deployment, Job, Tenant
from plexrl.scheduler.usage import recent_gpu_seconds

JOB_S = 3600.0
"""Length of a job that its user said nothing about."""

SHARE_WINDOW_S = 3600.0
"""GPU-seconds used count as much as the same number held over this time."""


def check_it_can_fit(sizes: Mapping[NodeKind, tuple[int, int]], deployment: Deployment) -> None:
    """Refuse what not even the empty cluster could hold.

    Raises:
        CapacityError: more GPUs than nodes of the wanted type have together.
        ModelDoesNotFitError: a rank's state is larger than a GPU's memory, or the whole state than
            the tiers it is offloaded to.
    """
    name, wanted = deployment.deployment, deployment.node_type
    typed = {kind: size for kind, size in sizes.items() if wanted in ("", kind.node_type)}
    of_type = f" of type {wanted!r}" if wanted else ""
    per_rank = -(-deployment.state_bytes // deployment.workers)
    gpus = max((gpus for gpus, _ in typed.values()), default=0)
    if deployment.workers > gpus:
        raise CapacityError(
            f"deployment {name!r} asks for {deployment.workers} GPUs{of_type}; the cluster has "
            f"{gpus} of one kind: ask for fewer workers or add nodes",
            workers=deployment.workers,
            gpus=gpus,
        )
    memory = max(
        kind.gpu_memory_bytes for kind, (count, _) in typed.items() if count >= deployment.workers
    )
    if per_rank > memory:
        needed = -(-deployment.state_bytes // memory)
        raise ModelDoesNotFitError(
            f"deployment {name!r} needs {per_rank} bytes on each of its {deployment.workers} GPUs; "
            f"a GPU{of_type} has {memory}: ask for at least {needed} workers or a smaller model",
            bytes_per_gpu=per_rank,
            gpu_memory_bytes=memory,
        )
    tiers = sum(tier_bytes for _, tier_bytes in typed.values())
    if shares(deployment) and deployment.state_bytes > tiers:
        raise ModelDoesNotFitError(
            f"deployment {name!r} has {deployment.state_bytes} bytes of state; the host tiers and "
            f"NVMe tiers hold {tiers}: raise them or ask for an exclusive group",
            state_bytes=deployment.state_bytes,
            host_memory_bytes=tiers,
        )


def enqueue_deployment(context: Context, deployment: Deployment) -> None:
    """A deployment was created: it waits for GPUs until the end of this event at least."""
    context.waiting[deployment.deployment] = None
    context.newcomers.append(deployment.deployment)
    if context.policy.repacks and shares(deployment):
        # By then it may share where it could not before.
        context.wake(deployment.created_at + context.config.cold_start_patience_s, "placement:")


def admit(context: Context, now: float) -> list[Deployment]:
    """Place whoever can be placed now; returns the placed, in the order of their turn.

    Everybody is looked at when capacity has come free. Else only newcomers are: those who waited
    before them failed on the same capacity.
    """
    everybody = context.place_waiting
    context.place_waiting = False
    newcomers, context.newcomers = context.newcomers, []
    names = list(context.waiting) if everybody else newcomers
    candidates = [context.deployment(name) for name in names if name in context.waiting]
    if len(candidates) > 1:
        keyed = {d.deployment: _turn(context, d, now) for d in candidates}
        candidates.sort(key=lambda d: keyed[d.deployment])
    hungry = _starving(context, now)
    failed: set[tuple[object, ...]] = set()
    placed: list[Deployment] = []
    seen: set[DeploymentId] = set()
    for deployment in candidates:
        if deployment.deployment in seen:
            continue
        gang = _gang(context, deployment)
        seen.update(each.deployment for each in gang)
        if not _may_start(context, gang, now, hungry):
            continue
        keys = {_likeness(each) for each in gang}
        if keys & failed:
            continue
        if _place_all(context, gang, now):
            placed += gang
        elif len(gang) == 1:
            failed |= keys
    return placed


def waiting_order(context: Context, now: float) -> list[Deployment]:
    """All waiting deployments in the order of their turn."""
    waiting = [context.deployment(name) for name in context.waiting]
    return sorted(waiting, key=lambda each: _turn(context, each, now))


def over_quota(context: Context, job: Job, gpus: int) -> str | None:
    """Which of its tenant's quotas `job` waits for; None where it may have `gpus` more."""
    tenant = context.state.tenants.get(job.tenant)
    if tenant is None:
        return None
    held_gpus, held_jobs = context.holdings(job.tenant)
    has_gpus = any(context.deployment(name).group is not None for name in job.deployments)
    if tenant.jobs_max is not None and not has_gpus and held_jobs >= tenant.jobs_max:
        return f"tenant {job.tenant!r} runs {held_jobs} jobs, its quota is {tenant.jobs_max}"
    if tenant.gpus_max is not None and held_gpus + gpus > tenant.gpus_max:
        return (
            f"tenant {job.tenant!r} holds {held_gpus} GPUs, its quota is {tenant.gpus_max}; this "
            f"asks for {gpus}"
        )
    return None


def _place_all(context: Context, gang: list[Deployment], now: float) -> bool:
    done: list[Deployment] = []
    # The largest first: it has the fewest places to go.
    for deployment in sorted(gang, key=lambda d: (-d.workers, d.created_at, d.deployment)):
        if place(context, deployment, now) is None:
            for each in reversed(done):
                leave(context, each)
                each.ranks = ()
                each.placement = None
            return False
        done.append(deployment)
    for deployment in gang:
        del context.waiting[deployment.deployment]
        context.hold(context.job(deployment.job).tenant, deployment, +1)
    return True


def _gang(context: Context, deployment: Deployment) -> list[Deployment]:
    job = context.job(deployment.job)
    if not job.gang:
        return [deployment]
    return [context.deployment(name) for name in job.deployments if name in context.waiting]


def _may_start(
    context: Context, gang: list[Deployment], now: float, hungry: Deployment | None
) -> bool:
    job = context.job(gang[0].job)
    if job.gang and len(job.deployments) < job.gang:
        return False
    if over_quota(context, job, sum(each.workers for each in gang)) is not None:
        return False
    if _is_partial(context, job):
        return True
    if hungry is None or hungry in gang:
        return True
    if context.policy.backfills and not _starves(context, hungry, now):
        return True
    # Behind a job that waits, only a place in a group that exists is free for the taking.
    return all(shares(each) and each.workers != hungry.workers for each in gang)


def _starving(context: Context, now: float) -> Deployment | None:
    """The waiting deployment whose turn it is, if it has been passed over for too long, or at
    all where the policy lets nobody pass."""
    best: tuple[tuple[object, ...], Deployment] | None = None
    for name in context.waiting:
        deployment = context.deployment(name)
        if context.policy.backfills and not _starves(context, deployment, now):
            # In the order of creation: who came later has waited less.
            break
        job = context.job(deployment.job)
        if over_quota(context, job, deployment.workers) is not None:
            continue
        if job.gang and len(job.deployments) < job.gang:
            continue
        key = _turn(context, deployment, now)
        if best is None or key < best[0]:
            best = key, deployment
    return None if best is None else best[1]


def _starves(context: Context, deployment: Deployment, now: float) -> bool:
    return now - deployment.created_at >= context.config.starvation_bound_s


def _is_partial(context: Context, job: Job) -> bool:
    return any(context.deployment(name).group is not None for name in job.deployments)


def _turn(context: Context, deployment: Deployment, now: float) -> tuple[object, ...]:
    job = context.job(deployment.job)
    expected_s = job.expected_s or JOB_S
    ratio = (now - deployment.created_at + expected_s) / expected_s
    return (
        not _is_partial(context, job),
        not _starves(context, deployment, now),
        -job.priority,
        tenant_share(context, job.tenant, now),
        -ratio,
        deployment.created_at,
        deployment.deployment,
    )


def tenant_share(context: Context, name: TenantId, now: float) -> float:
    """GPUs the tenant holds, and GPU-seconds it used lately, over its weight."""
    tenant = context.state.tenants.get(name)
    weight = 1.0 if tenant is None else tenant.weight
    used = 0.0 if tenant is None else recent_gpu_seconds(tenant, now)
    gpus, _ = context.holdings(name)
    return (gpus + used / SHARE_WINDOW_S) / weight


def _likeness(deployment: Deployment) -> tuple[object, ...]:
    """What two deployments share that both fit or both do not."""
    return (
        deployment.workers,
        deployment.node_type,
        shares(deployment),
        deployment.state_bytes,
        deployment.trace,
    )


def quota_of(tenant: Tenant) -> dict[str, float | int | None]:
    """The tenant's limits, None for none."""
    return {
        "weight": tenant.weight,
        "jobs_max": tenant.jobs_max,
        "gpus_max": tenant.gpus_max,
        "gpu_seconds_max": tenant.gpu_seconds_max,
    }
