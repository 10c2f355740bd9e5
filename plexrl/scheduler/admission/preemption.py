"""Detached jobs give their GPUs to jobs that wait for some.

A detached job (one without a controller) that has nothing to run holds GPUs for no purpose. When
another job waits that could use GPUs, the detached job is *set aside*: its deployments give their
GPUs back and enter no queue. One job is set aside at a time, the one whose controller was last seen
longest ago. The job loses nothing: once a controller attaches it, its deployments wait for GPUs
like new ones and continue from their state. Operations submitted before run first.
"""

from plexrl.scheduler.admission.deadlocks import is_waited_for, placed_of
from plexrl.scheduler.admission.fair_shares import begin_to_wait
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.placement.evacuation import displace, may_displace
from plexrl.scheduler.state import timers
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Job


def may_preempt(context: Context) -> bool:
    """Whether there is a detached job, and a deployment that waits for GPUs."""
    return bool(context.detached and context.waiting)


def preempt_detached(context: Context, now: float) -> bool:
    """Set one detached job aside, if a job that is not detached could use GPUs. False: none was."""
    if not may_preempt(context):
        return False
    detached = map(context.job, context.detached)
    idle = [job for job in detached if _is_idle(context, job)]
    if not idle or not is_waited_for(context, idle):
        return False
    _set_aside(context, min(idle, key=lambda each: (each.seen_at, each.job)), now)
    return True


def resume(context: Context, job: Job, now: float) -> None:
    """Enqueue the deployments of a job that was set aside and has a controller again."""
    if not job.is_set_aside:
        return
    job.is_set_aside = False
    begin_to_wait(context, job.tenant, now)
    for deployment in map(context.deployment, job.deployments):
        if deployment.state == WpgState.WAITING:
            context.wait(deployment)
            for node in deployment.stored.nodes:
                # A node may have been lost in the meantime.
                context.wake(now, timers.node_check(node))
    context.waiting.retry_all()


def _set_aside(context: Context, job: Job, now: float) -> None:
    for deployment in placed_of(context, job):
        displace(context, deployment, "its job has no controller, and others waited", now)
    job.is_set_aside = True
    del context.detached[job.job]
    for name in job.deployments:
        context.waiting.remove(name)
    context.waiting.retry_all()


def _is_idle(context: Context, job: Job) -> bool:
    """Whether the job has deployments and none of them has anything to run."""
    if not job.deployments:
        return False
    waits = any(context.deployment(name).queue for name in job.deployments)
    return not waits and all(may_displace(context, each) for each in placed_of(context, job))
