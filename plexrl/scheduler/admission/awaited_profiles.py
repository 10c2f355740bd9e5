"""How long a group stays closed while a member's profile is awaited.

Under policies that plan by time nobody joins a group before the demand of each member is known:
from a deployment like it, or after a few cycles. A member may run no cycles at all: an interactive
job between two cells of a notebook, or one whose controller only computes log-probabilities. Its
profile is awaited for `starvation_bound_s` after its newest cycle began, or after its placement.
Then others may join, as if it had an equal share of the group. The bound is the one after which
waiting jobs stop to give way. It is longer than a cycle of common jobs with the launch of their
workers, so a member that trains is still measured before others join. A longer cycle is measured
beside others, without its waiting.

Each timer finds out when to look again, so a group never stays closed without one.
"""

from typing import TYPE_CHECKING

from plexrl.scheduler.state.messages import timers

if TYPE_CHECKING:
    from plexrl.ids import DeploymentId
    from plexrl.scheduler.placement.cluster import Context
    from plexrl.scheduler.rules.settings import Settings
    from plexrl.scheduler.state.records import Deployment


def await_profile(context: "Context", deployment: "Deployment") -> None:
    """Set a timer for the end of the wait, if the deployment's group is closed for it."""
    settings = context.settings
    if settings.policy.repacks and _is_awaited(deployment):
        until = _awaited_until(settings, deployment)
        context.effects.wake(until, timers.profile(deployment.deployment))


def await_all_profiles(context: "Context") -> None:
    """Set the timers again: the settings may have changed."""
    for deployment in context.state.deployments.values():
        await_profile(context, deployment)


def look_for_profile(context: "Context", name: "DeploymentId", now: float) -> None:
    """Open the deployment's group if its profile has been awaited long enough."""
    cluster = context.cluster
    deployment = cluster.state.deployments.get(name)
    if deployment is None or not _is_awaited(deployment):
        return
    if now < _awaited_until(cluster.settings, deployment):
        await_profile(context, deployment)
        return
    deployment.demand.cycles.await_no_profile()
    for group in cluster.state.groups_of(deployment):
        cluster.capacity.inventory.refresh(group)
    cluster.queues.waiting.retry_all_if_any()


def _is_awaited(deployment: "Deployment") -> bool:
    """Whether others may not join the deployment's group until it has a profile."""
    reservation = deployment.placement.reservation
    return (
        deployment.has_gpus
        and deployment.spec.shares
        and not deployment.demand.cycles.is_overdue
        and (reservation is None or reservation.trace is None)
    )


def _awaited_until(settings: "Settings", deployment: "Deployment") -> float:
    placed, cycle = deployment.placement.record, deployment.demand.cycles.open
    since = 0.0 if placed is None else placed.at
    # Cycles without busy time, or of a strange length, give no profile.
    if (
        cycle is not None
        and len(deployment.demand.cycles.measured) < settings.config.profile_cycles
    ):
        since = max(since, cycle.started_at)
    return since + settings.config.starvation_bound_s
