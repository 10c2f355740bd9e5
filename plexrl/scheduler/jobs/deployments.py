"""Deployments that a job creates, divides anew and ends.

A deployment that ends before its job gives its GPUs, host memory and disk space back. What it had
not done fails as cancelled. Its record stays, stopped, until the job is dropped: its operations and
use can be looked up, and its name is not used again, so a controller that repeats its creation does
not get GPUs for it a second time.
"""

import json

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    OperationCancelledError,
    UnknownDeploymentError,
)
from plexrl.scheduler.accounting.earlier_jobs import begin_with_known
from plexrl.scheduler.accounting.sharing import note_wait
from plexrl.scheduler.accounting.tenants import check_gpus
from plexrl.scheduler.accounting.usage import bill_cut_off
from plexrl.scheduler.admission.admission import enqueue_deployment
from plexrl.scheduler.admission.automatic_sharing import check_it_can_share, share_if_scarce
from plexrl.scheduler.jobs.controllers import check_controller, seen
from plexrl.scheduler.jobs.lifecycle import (
    all_placed,
    end_deployment,
    has_all_gpus,
    relayout,
    restart,
)
from plexrl.scheduler.operations.operations import check_saved
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.rules.lookups import find_deployment, find_job, find_live_job
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.replay_log import ReplayLog
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.deployment.work import DeploymentWork
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages.events import (
    DeploymentCreated,
    DeploymentEnded,
    DeploymentRelaid,
)
from plexrl.scheduler.state.records import Deployment, Job, State
from plexrl.wire.operations import USER_KINDS, CheckpointSchedule
from plexrl.wire.parameter_checks import differing_settings


def deployment_created(context: Context, event: DeploymentCreated, now: float) -> None:
    """Create a deployment; a repeated call changes nothing, also after its end.

    Raises:
        ConflictError: the name has other settings.
        PlexRLError: the kind is unknown, not even an empty cluster could hold it, or a limit of its
            tenant.
    """
    job = find_live_job(context.state, event.job)
    check_controller(job, event.controller)
    known = context.state.deployments.get(event.deployment)
    spec = requested_spec(event, job)
    if known is not None:
        _check_same(known, event, spec)
        return
    if event.kind not in USER_KINDS:
        raise InvalidRequestError(f"deployment {event.deployment!r}: use {' or '.join(USER_KINDS)}")
    if event.preemptible:
        _check_preemptible(job, event)
    deployment = new_deployment(event, spec, now)
    if not event.preemptible:
        check_gpus(context.state, job, event.workers)
    check_it_can_share(context, job, deployment)
    _add(context, job, deployment)
    seen(context, job, now)
    share_if_scarce(context, deployment)
    enqueue_deployment(context, deployment)


def new_deployment(event: DeploymentCreated, spec: RequestedSpec, now: float) -> Deployment:
    """The record of a deployment that was just created, which is not part of the state yet."""
    return Deployment(
        deployment=event.deployment,
        job=event.job,
        created_at=now,
        spec=spec,
        work=DeploymentWork(
            replay=ReplayLog(past_is_whole=True),
        ),
        demand=Demand(
            estimates=Estimates(event.state_bytes),
            trace=event.trace,
            memory=event.memory,
        ),
    )


def requested_spec(event: DeploymentCreated, job: Job) -> RequestedSpec:
    """What is asked for, as the job's bound of waiting allows it."""
    owns_group = job.slo == 0.0 or (event.kind == "rollout" and not event.shares)
    return RequestedSpec(
        kind=event.kind,
        workers=event.workers,
        state_bytes=event.state_bytes,
        exclusive=event.exclusive or (owns_group and not event.preemptible),
        spec_json=event.spec_json,
        node_type=event.node_type,
        preemptible=event.preemptible,
        pace=event.pace,
        steps_in_host=event.steps_in_host,
        checkpoints=event.checkpoints,
        shares_if_scarce=event.shares_if_scarce and event.kind == "rollout" and job.slo != 0.0,
    )


def _check_same(known: Deployment, event: DeploymentCreated, spec: RequestedSpec) -> None:
    """Raises `ConflictError` if the deployment that has the name was created otherwise."""
    spec_json = known.spec.created_spec_json or known.spec.spec_json
    names = ("kind", "workers", "node_type", "preemptible")
    same = {"job": known.job} | {name: getattr(known.spec, name) for name in names}
    same |= _scheduled(known.spec.checkpoints)
    asked = {name: getattr(event, name) for name in ("job", *names)}
    asked |= _scheduled(event.checkpoints)
    if event.kind != "rollout" or known.spec.preemptible:
        same["exclusive"], asked["exclusive"] = known.spec.exclusive, spec.exclusive
    elif not spec.shares_if_scarce:
        # Who leaves it to the scheduler takes what was decided, by an earlier version too.
        same["shares_gpus"] = None if known.spec.shares_if_scarce else not known.spec.exclusive
        asked["shares_gpus"] = not spec.exclusive
    if same != asked or spec_json != event.spec_json:
        # The specification repeats some of them, and tells a reference from a training.
        same, asked = same | json.loads(spec_json), asked | json.loads(event.spec_json)
        raise ConflictError(
            f"deployment {event.deployment!r} exists with other settings: "
            f"{differing_settings(same, asked)}: use another name, or the same settings"
        )


def _add(context: Context, job: Job, deployment: Deployment) -> None:
    """The deployment is one of its job's from now on, with what is known of its demand."""
    state = context.state
    state.deployments_made += 1
    deployment.serial = state.deployments_made
    state.deployments[deployment.deployment] = deployment
    job.deployments.append(deployment.deployment)
    if deployment.demand.trace is None:
        begin_with_known(context, deployment)
    context.cluster.unmeasured.add(deployment)
    if deployment.demand.trace is not None and not deployment.demand.has_prior:
        deployment.demand.cycles.expect(job.expected_s, deployment.demand.trace.period_s)


def _scheduled(checkpoints: CheckpointSchedule | None) -> dict[str, object]:
    """The settings of a schedule by the names that a user gave them."""
    kept: tuple[int | None, ...] = (None, None, None)
    if checkpoints is not None:
        kept = (checkpoints.every, checkpoints.keep_last, checkpoints.keep_bytes)
    return dict(zip(("checkpoint_every", "checkpoint_keep", "checkpoint_bytes"), kept, strict=True))


def _check_preemptible(job: Job, event: DeploymentCreated) -> None:
    """Raises `InvalidRequestError` if such a deployment cannot be preemptible."""
    if event.kind != "rollout" or event.exclusive:
        raise InvalidRequestError(
            f"deployment {event.deployment!r}: only a rollout deployment that is not exclusive can "
            "be preemptible"
        )
    if len(job.deployments) < job.gang:
        raise InvalidRequestError(
            f"deployment {event.deployment!r} is preemptible, and so is not part of the gang of "
            f"{job.gang} deployments: create those first"
        )


def deployment_relaid(context: Context, event: DeploymentRelaid, now: float) -> None:
    """Divide a rollout's GPUs in another way.

    Raises:
        InvalidRequestError: it is no rollout deployment.
        UnknownDeploymentError: there is none, or it has ended.
    """
    deployment = find_deployment(context.state, event.deployment)
    check_controller(find_live_job(context.state, deployment.job), event.controller)
    check_not_ended(deployment)
    if relayout(context.cluster, deployment, event):
        bill_cut_off(context.state, deployment, now)
        restart(context, deployment, "it has another layout", now, counts=False)


def deployment_ended(context: Context, event: DeploymentEnded, now: float) -> None:
    """End a deployment, with all that it has not done; a repeated call changes nothing.

    Raises:
        ConflictError: another deployment of the job needs its weights.
        OverloadedError: a scheduled checkpoint of it is not pinned yet.
        UnknownDeploymentError: there is none.
    """
    state = context.state
    deployment = find_deployment(state, event.deployment)
    job = find_job(state, deployment.job)
    check_controller(job, event.controller)
    if deployment.wpg.state == WpgState.STOPPED:
        return
    _check_unused(state, job, deployment)
    check_saved(state, [deployment])
    if deployment.placement.groups and deployment.work.queue:
        note_wait(state, deployment, now)
    error = OperationCancelledError(
        f"deployment {deployment.deployment!r} was ended before this operation was carried out",
        job=job.job,
    )
    end_deployment(context, deployment, error, now)
    _leave_job(context.cluster.queues, job, deployment)
    seen(context, job, now)
    context.cluster.queues.waiting.retry_all()


def check_not_ended(deployment: Deployment) -> None:
    """Raises `UnknownDeploymentError` if the deployment of a live job has ended."""
    if deployment.wpg.state == WpgState.STOPPED:
        raise UnknownDeploymentError(
            f"deployment {deployment.deployment!r} was ended: create one of another name"
        )


def _check_unused(state: State, job: Job, deployment: Deployment) -> None:
    """Refuse to end a deployment from which another one pulls weights, or would pull them again
    after a loss. Raises `ConflictError`."""
    for name in job.deployments:
        other = state.deployment(name)
        # A sync that waits is in the queue of the deployment that receives the weights.
        pulls = (
            *other.work.queue,
            *other.work.running,
            *other.work.replay.log,
            *other.work.replay.past,
        )
        if any(state.operations[pull].source == deployment.deployment for pull in pulls):
            raise ConflictError(
                f"{name!r} needs the weights of {deployment.deployment!r}: end {name!r} first"
            )


def _leave_job(queues: Queues, job: Job, deployment: Deployment) -> None:
    """The other deployments of the job go on without this one."""
    was_whole = len(job.deployments) >= job.gang
    job.deployments.remove(deployment.deployment)
    job.ended_deployments.append(deployment.deployment)
    if was_whole:
        # They need not wait for a successor.
        job.gang = min(job.gang, len(job.deployments))
    others = [queues.state.deployment(name) for name in job.deployments]
    for other in others:
        if other.deployment in queues.waiting:
            # Alone, or as the rest of a gang, at the place of its age.
            queues.wait(other)
    if others and has_all_gpus(queues.state, job):
        all_placed(queues, job)
