"""Whether GPUs are scarce: who else waits for them, and may have them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plexrl.scheduler.context import Context
    from plexrl.scheduler.state import Deployment, Job


def is_scarce(context: "Context", deployment: "Deployment") -> bool:
    """Whether somebody else who may have GPUs waits for more than are free; or, where `deployment`
    has none itself, than would be left had it a group of its own."""
    taken = deployment.workers if deployment.group is None else 0
    for other in _two_of_each_kind(context):
        if other is deployment or not alike(other.node_type, deployment.node_type):
            continue
        left = context.inventory.pool.free_gpus(other.node_type) - taken
        job = context.job(other.job)
        if (
            other.workers > left
            and len(job.deployments) >= job.gang
            and over_quota(context, job, other.workers) is None
        ):
            return True
    return False


def _two_of_each_kind(context: "Context") -> "Iterator[Deployment]":
    """Of those who wait: one of the two may be who asks. That is asked of each of a backlog, which
    may want one thing in as many ways as it has jobs."""
    waiting = context.waiting
    for tenants in waiting.askers.values():
        for queue in tenants.values():
            for _, name in queue[:2]:
                yield context.deployment(name)
    for name in waiting.singles:
        yield context.deployment(name)


def alike(one_type: str, other_type: str) -> bool:
    """Whether two wishes could be for the same node."""
    return "" in (one_type, other_type) or one_type == other_type


def over_quota(context: "Context", job: "Job", gpus: int) -> str | None:
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
