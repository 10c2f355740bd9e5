"""Who gets GPUs next: quotas, priorities, weighted fairness and response ratio (PlexRL §5.2.3).

Those who wait are looked at in the order of their turns (`turns`). A job that asked for a gang gets
GPUs for all its deployments at once or for none. One that waits beyond the starvation bound is
passed by nobody behind it who would take free GPUs that it might be waiting for; where the policy
does not backfill, nobody is passed. Who could not have GPUs even if all other jobs ended
(`feasibility`) holds nobody up.
"""

from plexrl.scheduler.admission.admission_pass import AdmissionPass
from plexrl.scheduler.admission.fair_shares import begin_to_wait
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.placement.placement import patience_ends_at, shares
from plexrl.scheduler.state import timers
from plexrl.scheduler.state.records import Deployment
from plexrl.scheduler.state.tenant import Tenant


def enqueue_deployment(context: Context, deployment: Deployment) -> None:
    """A deployment was created: it waits for GPUs until the end of this event at least."""
    begin_to_wait(context, context.job(deployment.job).tenant, deployment.created_at)
    context.wait(deployment)
    context.newcomers.append(deployment.deployment)
    _wake_when_patience_ends(context, deployment)


def wake_patient(context: Context) -> None:
    """The settings are others: whoever waits may share at a time at which it could not before."""
    for name in sorted(context.waiting):
        _wake_when_patience_ends(context, context.deployment(name))


def _wake_when_patience_ends(context: Context, deployment: Deployment) -> None:
    if context.policy.repacks and shares(deployment):
        # By then it may share where it could not before.
        context.wake(patience_ends_at(context, deployment), timers.PLACEMENT)


def admit(context: Context, now: float) -> list[Deployment]:
    """Place whoever can be placed now; returns the placed, in the order of their turn.

    Everybody is looked at when capacity has come free. Else only newcomers are: those who waited
    before them failed on the same capacity.
    """
    everybody = context.place_waiting
    context.place_waiting = False
    newcomers, context.newcomers = context.newcomers, []
    here = [name for name in newcomers if name in context.waiting]
    if not (context.waiting if everybody else here):
        return []
    return AdmissionPass(context, now, None if everybody else here).run()


def quota_of(tenant: Tenant) -> dict[str, float | int | None]:
    """The tenant's limits, None for none."""
    return {
        "weight": tenant.weight,
        "jobs_max": tenant.jobs_max,
        "gpus_max": tenant.gpus_max,
        "gpu_seconds_max": tenant.gpu_seconds_max,
        "live_jobs_max": tenant.live_jobs_max,
        "checkpoints_max": tenant.checkpoints_max,
        "checkpoint_bytes_max": tenant.checkpoint_bytes_max,
        "priority_max": tenant.priority_max,
    }
