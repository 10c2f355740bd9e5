"""Steps after a cycle has ended: profile, reservation, service level, repacking."""

from plexrl.scheduler.capacity.overlaps import update_reservation
from plexrl.scheduler.capacity.shift_search import is_off_plan
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.jobs.profiler import refresh
from plexrl.scheduler.placement.relocation import (
    consider_relief,
    consider_repacking,
    holds_up_others,
)
from plexrl.scheduler.state.job import change_job
from plexrl.scheduler.state.machines.job_states import JobTrigger
from plexrl.scheduler.state.records import Deployment


def cycle_over(context: Context, deployment: Deployment, now: float) -> None:
    """Use the deployment's newest cycle."""
    if deployment.group is None or not deployment.shares:
        return
    if refresh(deployment, context.profiler):
        remember(context, deployment)
        if context.policy.repacks:
            # Other policies do not plan by time.
            _follow(context, deployment)
        if context.policy.plans_by_profile:
            # Its group may now take others.
            context.waiting.retry_all_if_any()
        change_job(context.job(deployment.job), JobTrigger.CYCLE_ENDED)
        moves = consider_repacking(context, deployment, now)
    else:
        moves = False
        if context.policy.repacks:
            if _is_beside_plan(context, deployment):
                _follow(context, deployment)
            if holds_up_others(context, deployment):
                moves = consider_repacking(context, deployment, now)
    if consider_relief(context, deployment, now) or moves:
        context.touch(deployment.group)


def remember(context: Context, deployment: Deployment) -> None:
    """Store the profile for the next job of the same tenant and name (warm start)."""
    assert deployment.trace is not None
    profiles = context.state.profiles
    key = profile_key(context, deployment)
    profiles.pop(key, None)
    profiles[key] = deployment.trace
    # There may be several if the setting was reduced.
    while len(profiles) > context.config.profiles:
        del profiles[next(iter(profiles))]


def profile_key(context: Context, deployment: Deployment) -> str:
    """Key of the profile: a later deployment with the same key starts with it."""
    job = context.job(deployment.job)
    name = deployment.deployment.rsplit("/", 1)[-1]
    parts = (job.tenant, job.name, name, str(deployment.workers), str(deployment.state_bytes))
    return "/".join(parts)


def _follow(context: Context, deployment: Deployment) -> None:
    """Shift the reservation to where the job really runs."""
    cycle = deployment.cycles.open
    started_at = (
        cycle.started_at if cycle is not None else deployment.cycles.measured[-1].started_at
    )
    update_reservation(context, deployment, started_at % context.config.horizon_slots)


def _is_beside_plan(context: Context, deployment: Deployment) -> bool:
    reservation, cycle = deployment.reservation, deployment.cycles.open
    if reservation is None or reservation.trace is None or cycle is None:
        return False
    assert deployment.group is not None, f"{deployment.deployment} has a plan and no group"
    footprint = context.inventory.index.footprint(deployment.group, deployment.deployment)
    started_at = cycle.started_at % context.config.horizon_slots
    return is_off_plan(started_at, reservation.shift, footprint.period)
