"""Steps after a cycle has ended: profile, reservation, service level, repacking."""

from plexrl.scheduler.accounting.earlier_jobs import (
    prior_of,
    remember,
    shape_key,
    take_prior,
    usual_length,
)
from plexrl.scheduler.accounting.profiler import refresh
from plexrl.scheduler.admission.automatic_sharing import share_if_scarce
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.overlaps import follow
from plexrl.scheduler.placement.capacity.shift_search import is_off_plan
from plexrl.scheduler.placement.cluster import Cluster, Context
from plexrl.scheduler.recovery.relocation import (
    consider_relief,
    consider_repacking,
    holds_up_others,
)
from plexrl.scheduler.state.job import change_job
from plexrl.scheduler.state.machines.job_states import JobTrigger
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, State


def cycle_over(context: Context, deployment: Deployment, now: float) -> None:
    """Use the deployment's newest cycle."""
    settings, cluster = context.settings, context.cluster
    if not deployment.placement.groups or not deployment.spec.may_share:
        return
    is_renewed = refresh(deployment, settings.profiler)
    _use_peak(cluster, deployment, is_renewed=is_renewed)
    if is_renewed:
        cluster.unmeasured.remove(deployment)
        deployment.demand.cycles.have_profile()
        _expect_cycles(context.state, deployment)
        if remember(context, deployment):
            plan_by_prior(cluster, shape_key(deployment))
    share_if_scarce(context, deployment)
    if not deployment.spec.shares:
        return
    if is_renewed:
        if settings.policy.repacks:
            # Other policies do not plan by time.
            follow(cluster.capacity, deployment)
        if settings.policy.plans_by_profile:
            # Its group may now take others.
            cluster.queues.waiting.retry_all_if_any()
        change_job(context.state.job(deployment.job), JobTrigger.CYCLE_ENDED)
        moves = consider_repacking(cluster, deployment, now)
    else:
        moves = False
        if settings.policy.repacks:
            if _is_beside_plan(cluster.capacity, deployment):
                follow(cluster.capacity, deployment)
            if holds_up_others(cluster, deployment):
                moves = consider_repacking(cluster, deployment, now)
    if consider_relief(cluster, deployment, now) or moves:
        context.effects.touch_all(deployment.placement.groups)


def plan_by_prior(cluster: Cluster, shape: str) -> None:
    """Plan the deployments of a shape by its prior, which is new: those that wait, and those whose
    groups are closed until they are measured. Others with GPUs are measured soon."""
    prior = prior_of(cluster, shape)
    for name in cluster.unmeasured.of(shape):
        deployment = cluster.state.deployment(name)
        if deployment.placement.reservation is None:
            take_prior(deployment, prior)
            if name in cluster.queues.waiting:
                cluster.queues.demand_changed(deployment)
        elif deployment.demand.trace is None:
            take_prior(deployment, prior)
            deployment.demand.cycles.have_profile()
            if deployment.spec.shares:
                follow(cluster.capacity, deployment)


def learning_changed(cluster: Cluster) -> None:
    """`learns_from_jobs` was switched: use what is known of earlier jobs, or forget it, with
    profiles of fewer cycles than are needed now. Their groups close until there is a profile."""
    state, settings = cluster.state, cluster.settings
    for job in state.jobs.values():
        if not job.state.is_final:
            job.usual_s = usual_length(cluster, job.tenant, job.name)
    for deployment in state.deployments.values():
        trace = deployment.demand.trace
        if trace is None or deployment.wpg.state == WpgState.STOPPED:
            continue
        if deployment.demand.has_prior or 0 < trace.cycles < settings.profiler.first:
            take_prior(deployment, None)
            cluster.unmeasured.add(deployment)
            if deployment.placement.reservation is not None and deployment.spec.shares:
                follow(cluster.capacity, deployment)
    for shape in cluster.unmeasured.shapes():
        if prior_of(cluster, shape) is not None:
            plan_by_prior(cluster, shape)
    for name in list(cluster.queues.waiting):
        cluster.queues.wait(state.deployment(name))
    cluster.queues.waiting.retry_all()


def _expect_cycles(state: State, deployment: Deployment) -> None:
    assert deployment.demand.trace is not None
    expected_s = state.job(deployment.job).expected_s
    deployment.demand.cycles.expect(expected_s, deployment.demand.trace.period_s)


def _use_peak(cluster: Cluster, deployment: Deployment, *, is_renewed: bool) -> None:
    """Replace the estimate of activations by the measured peak once there is a profile, and later
    if a higher one was measured."""
    memory, group = deployment.demand.memory, cluster.state.group_of(deployment)
    if memory is None or group is None or not deployment.demand.peak_bytes:
        return
    if not (memory.is_measured or is_renewed):
        return
    found = memory.measured(deployment.demand.peak_bytes, group.gpu_memory_bytes)
    if memory.is_measured and found.activations <= memory.activations:
        return
    deployment.demand.need(found)
    for each in cluster.state.groups_of(deployment):
        cluster.capacity.inventory.refresh(each)
    cluster.queues.waiting.retry_all_if_any()


def _is_beside_plan(capacity: Capacity, deployment: Deployment) -> bool:
    reservation, cycle = deployment.placement.reservation, deployment.demand.cycles.open
    if reservation is None or reservation.trace is None or cycle is None:
        return False
    assert deployment.placement.group is not None, (
        f"{deployment.deployment} has a plan and no group"
    )
    footprint = capacity.inventory.index.footprint(
        deployment.placement.group, deployment.deployment
    )
    started_at = cycle.started_at % capacity.settings.config.horizon_slots
    return is_off_plan(started_at, reservation.shift, footprint.period)
