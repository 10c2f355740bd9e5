"""Detached jobs give their GPUs to jobs that wait for some.

A detached job (one without a controller) that has nothing to run holds GPUs for no purpose. When
another job waits that could use GPUs, the detached job is *set aside*: its deployments give their
GPUs back and enter no queue. One job is set aside at a time, the one whose controller was last seen
longest ago. The job loses nothing: once a controller attaches it, its deployments wait for GPUs
like new ones and continue from their state. Operations submitted before run first.
"""

from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.recovery.deadlocks import is_waited_for, placed_of
from plexrl.scheduler.recovery.evacuation import displace, may_displace
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.records import Job


def preempt_detached(context: Context, now: float) -> bool:
    """Set one detached job aside, if a job that is not detached could use GPUs. False: none was."""
    cluster = context.cluster
    detached = map(context.state.job, cluster.holdings.detached)
    idle = [job for job in detached if _is_idle(context, job)]
    if not idle or not is_waited_for(cluster, idle):
        return False
    job = min(idle, key=lambda each: (each.seen_at, each.serial))
    for deployment in placed_of(context.state, job):
        displace(context, deployment, "its job has no controller, and others waited", now)
    job.is_set_aside = True
    del cluster.holdings.detached[job.job]
    for name in job.deployments:
        cluster.queues.stop_waiting(name)
    cluster.queues.waiting.retry_all()
    return True


def _is_idle(situation: Situation, job: Job) -> bool:
    """Whether the job has deployments and none of them has anything to run."""
    state = situation.state
    if not job.deployments:
        return False
    deployments = list(map(state.deployment, job.deployments))
    works = any(deployment.work.queue or deployment.work.running for deployment in deployments)
    return not works and all(may_displace(situation, each) for each in placed_of(state, job))
