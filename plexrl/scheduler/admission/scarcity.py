"""Whether GPUs are scarce: who else waits for them, and may have them."""

from typing import TYPE_CHECKING

from plexrl.scheduler.admission.fit.feasibility import is_possible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plexrl.scheduler.admission.queues.waiting import Size
    from plexrl.scheduler.core.context import Context
    from plexrl.scheduler.state.records import Deployment, Job


def is_scarce(context: "Context", deployment: "Deployment") -> bool:
    """Whether somebody else who may have GPUs waits for more than are free; or, where `deployment`
    has none itself, than would be left had it a group of its own."""
    taken = deployment.workers if deployment.group is None else 0
    waiting, node_type = context.waiting, deployment.node_type
    for size, tenants in waiting.pending_by_tenant.items():
        if not node_types_compatible(size.node_type, node_type):
            continue
        # All who ask for this size want the same of the same nodes.
        if size.workers <= context.inventory.pool.free_gpus(size.node_type) - taken:
            continue
        for queue in tenants.values():
            # One of the first two may be who asks. More are not looked at: that is asked of each of
            # a backlog, which may want one thing in as many ways as it has jobs.
            other = context.deployment(queue[0][1])
            if other is deployment:
                if len(queue) == 1:
                    continue
                other = context.deployment(queue[1][1])
            if _may_have_gpus(context, other):
                return True
    for name in waiting.of_partial_jobs:
        other = context.deployment(name)
        if (
            other is not deployment
            and node_types_compatible(other.node_type, node_type)
            and other.workers > context.inventory.pool.free_gpus(other.node_type) - taken
            and _may_have_gpus(context, other)
        ):
            return True
    return False


def _may_have_gpus(context: "Context", deployment: "Deployment") -> bool:
    """Whether nothing but room is wanting."""
    job = context.job(deployment.job)
    if len(job.deployments) < job.gang or over_quota(context, job, deployment.workers) is not None:
        return False
    return is_possible(context, deployment)


def node_types_compatible(one_type: str, other_type: str) -> bool:
    """Whether two wishes could be for the same node."""
    return "" in (one_type, other_type) or one_type == other_type


def is_rival(size: "Size", others: "Iterable[Size]") -> bool:
    """Whether a group that deployments of one of the `others` may join is one that those of `size`
    wait for, of whatever type, or to have its GPUs for themselves."""
    for other in others:
        if other.workers == size.workers and node_types_compatible(other.node_type, size.node_type):
            return True
    return False


def over_quota(context: "Context", job: "Job", gpus: int) -> str | None:
    """Which of its tenant's quotas `job` waits for; None where it may have `gpus` more."""
    tenant = context.state.tenants.get(job.tenant)
    if tenant is None:
        return None
    if tenant.jobs_max is None and tenant.gpus_max is None:
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
