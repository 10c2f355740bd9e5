"""Admission of waiting deployments: quotas, priorities, weighted fairness and response ratio
(PlexRL §5.2.3).

Waiting deployments are considered in the order of `admission.order`. A job that asked for a gang
gets GPUs for all its deployments at once, or for none. A deployment that has waited beyond the
starvation bound blocks all deployments behind it from free GPUs that it may need; without
backfilling every waiting deployment does so. A deployment that could not get GPUs even if all other
jobs ended (`fit.feasibility`) blocks no other.
"""

from plexrl.scheduler.accounting.fair_shares import begin_to_wait
from plexrl.scheduler.admission.automatic_sharing import share_if_refused
from plexrl.scheduler.admission.walk import AdmissionWalk
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.placement.placement import patience_ends_at
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.records import Deployment


def enqueue_deployment(context: Context, deployment: Deployment) -> None:
    """Enqueue a new deployment; it is considered at the end of this event."""
    cluster = context.cluster
    if not deployment.spec.preemptible:
        begin_to_wait(
            cluster.holdings,
            cluster.queues.waiting.by_tenant,
            cluster.state.job(deployment.job).tenant,
            deployment.created_at,
        )
    cluster.queues.wait(deployment)
    cluster.queues.waiting.newcomers.append(deployment.deployment)
    if _has_patience(cluster.settings, deployment):
        context.effects.wake(patience_ends_at(cluster.settings, deployment), timers.PLACEMENT)


def patience_ends(queues: Queues) -> list[float]:
    """When the patience of each waiting deployment ends: timers to set after a change of the
    settings."""
    waiting = [queues.state.deployment(name) for name in sorted(queues.waiting)]
    return [
        patience_ends_at(queues.settings, each)
        for each in waiting
        if _has_patience(queues.settings, each)
    ]


def _has_patience(settings: Settings, deployment: Deployment) -> bool:
    """Whether the deployment may share a group once its patience has ended."""
    return settings.policy.repacks and deployment.spec.shares and not deployment.spec.preemptible


def admit(context: Context, now: float) -> list[Deployment]:
    """Place all deployments that can be placed now; returns them in the order of admission.

    All waiting deployments are considered if capacity has become free; otherwise only the new ones,
    because the others have already failed on the same capacity.
    """
    cluster, waiting = context.cluster, context.cluster.queues.waiting
    all_waiting = waiting.must_retry
    newcomers = [name for name in waiting.take_newcomers() if name in waiting]
    if not (waiting if all_waiting else newcomers):
        return []
    placed = AdmissionWalk(cluster, now, None if all_waiting else newcomers).run()
    left = share_if_refused(context, [name for name in newcomers if name in waiting])
    return [*placed, *AdmissionWalk(cluster, now, left).run()] if left else placed
