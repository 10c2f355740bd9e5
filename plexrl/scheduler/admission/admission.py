"""Admission of waiting deployments: quotas, priorities, weighted fairness and response ratio
(PlexRL §5.2.3).

Waiting deployments are considered in the order of `admission.order`. A job that asked for a gang
gets GPUs for all its deployments at once, or for none. A deployment that has waited beyond the
starvation bound blocks all deployments behind it from free GPUs that it may need; without
backfilling every waiting deployment does so. A deployment that could not get GPUs even if all other
jobs ended (`fit.feasibility`) blocks no other.
"""

from plexrl.scheduler.admission.admission_pass import AdmissionPass
from plexrl.scheduler.admission.fair_shares import begin_to_wait
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.placement.placement import patience_ends_at
from plexrl.scheduler.state import timers
from plexrl.scheduler.state.records import Deployment


def enqueue_deployment(context: Context, deployment: Deployment) -> None:
    """Enqueue a new deployment; it is considered at the end of this event."""
    begin_to_wait(context, context.job(deployment.job).tenant, deployment.created_at)
    context.wait(deployment)
    context.waiting.newcomers.append(deployment.deployment)
    _wake_when_patience_ends(context, deployment)


def reset_patience_timers(context: Context) -> None:
    """Set the patience timers again after a change of the settings."""
    for name in sorted(context.waiting):
        _wake_when_patience_ends(context, context.deployment(name))


def _wake_when_patience_ends(context: Context, deployment: Deployment) -> None:
    if context.policy.repacks and deployment.shares:
        # From then on the deployment may share a group.
        context.wake(patience_ends_at(context, deployment), timers.PLACEMENT)


def admit(context: Context, now: float) -> list[Deployment]:
    """Place all deployments that can be placed now; returns them in the order of admission.

    All waiting deployments are considered if capacity has become free; otherwise only the new ones,
    because the others have already failed on the same capacity.
    """
    all_waiting = context.waiting.must_retry
    still_waiting = [name for name in context.waiting.take_newcomers() if name in context.waiting]
    if not (context.waiting if all_waiting else still_waiting):
        return []
    return AdmissionPass(context, now, None if all_waiting else still_waiting).run()
