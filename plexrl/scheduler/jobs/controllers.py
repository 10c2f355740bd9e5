"""Controllers of jobs: heartbeats, attachment, fencing, acknowledgement of failures.

A controller chooses a token. The last controller that submitted or attached a job is the job's
controller, and a call with another token is refused: a controller that was replaced is fenced off.
Calls without a token come from an operator, or from a controller that uses no fencing.
"""

from typing import TYPE_CHECKING

from plexrl.errors import (
    ConflictError,
    ControllerReplacedError,
    InvalidRequestError,
    JobEndedError,
)
from plexrl.ids import JobId
from plexrl.limits import RECORDS_MAX
from plexrl.scheduler.accounting.earlier_jobs import usual_length
from plexrl.scheduler.accounting.fair_shares import begin_to_wait
from plexrl.scheduler.accounting.tenants import check_budget, check_live_jobs, check_priority
from plexrl.scheduler.jobs.lifecycle import ENDINGS, detach, detach_or_cancel, end_job
from plexrl.scheduler.operations.failures import acknowledge, job_failure, read_error, root_of
from plexrl.scheduler.operations.gradients import gradients_to_come
from plexrl.scheduler.operations.operations import check_saved, enqueue_zero_grad
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.rules.lookups import (
    find_deployment,
    find_job,
    find_live_job,
    find_operation,
    unknown_job,
)
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.messages.events import (
    ControllerAttached,
    ControllerSeen,
    FailureAcknowledged,
    JobFinished,
    JobKeyAdded,
    JobKeysRevoked,
    JobSubmitted,
)
from plexrl.scheduler.state.records import Job, State

if TYPE_CHECKING:
    from plexrl.ids import OperationId

JOB_KEYS_MAX = 16
"""Valid keys of one job; a further key takes the place of the oldest."""
FORK_SETTINGS_MAX = 64
"""Settings of a fork."""
FORK_SETTING_MAX = 1000
"""Characters of a setting's name, and of its value: the journal keeps them."""
DETACHED = "detached"
"""Outcome that detaches the job, so that another controller can attach it."""

OUTCOMES = frozenset({*ENDINGS, DETACHED})


def check_controller(job: Job, controller: str) -> None:
    """Refuse a token other than that of the job's present controller.

    Raises:
        ControllerReplacedError: the token belongs to a former controller.
    """
    if controller and controller != job.controller:
        raise ControllerReplacedError(
            f"another controller has attached job {job.job!r}: this one may not act for it any "
            "more; end this process, or attach the job again to replace the other one",
            job=job.job,
        )


def job_submitted(context: Context, event: JobSubmitted, now: float) -> None:
    """A controller submits a job, or submits it again.

    Raises:
        ConflictError: another job has its id.
        PlexRLError: a limit of its tenant.
    """
    cluster = context.cluster
    known = cluster.state.jobs.get(event.job)
    if known is not None:
        if (known.tenant, known.name) != (event.tenant, event.name):
            raise ConflictError(f"job id {event.job!r} is taken: choose another")
        if event.controller and not known.state.is_final:
            take_over(context.step(now), known, event.controller)
        return
    _check_fork(cluster.state, event)
    check_priority(cluster.state, event.tenant, event.priority)
    check_budget(cluster.holdings, event.tenant, now)
    check_live_jobs(cluster.holdings, cluster.settings, event.tenant)
    tenant = cluster.state.tenants.get(event.tenant)
    default_slo = None if tenant is None else tenant.slo
    cluster.state.jobs_made += 1
    cluster.state.jobs[event.job] = Job(
        job=event.job,
        serial=cluster.state.jobs_made,
        tenant=event.tenant,
        name=event.name,
        controller_timeout_s=event.controller_timeout_s,
        reattach_timeout_s=event.reattach_timeout_s,
        submitted_at=now,
        seen_at=now,
        priority=event.priority,
        gang=event.gang,
        expected_s=event.expected_s,
        usual_s=usual_length(context, event.tenant, event.name),
        slo=default_slo if event.slo is None else event.slo,
        controller=event.controller,
        user=event.user,
        halts_on_failure=event.halts_on_failure,
        quote=event.quote,
        fork=event.fork,
    )
    cluster.holdings.count_live_job(event.tenant, +1)
    context.effects.wake(now + event.controller_timeout_s, timers.silence(event.job))


def _check_fork(state: State, event: JobSubmitted) -> None:
    """Raises `UnknownJobError` if a fork is of no job of its tenant, `InvalidRequestError` if it
    says too much."""
    if event.fork is None:
        return
    if find_job(state, JobId(event.fork["job"])).tenant != event.tenant:
        raise unknown_job(JobId(event.fork["job"]))
    step, settings = event.fork["step"], event.fork["settings"]
    if not 0 <= step <= RECORDS_MAX or len(settings) > FORK_SETTINGS_MAX:
        raise InvalidRequestError(
            f"a fork is of a step from 0 to {RECORDS_MAX} and has at most {FORK_SETTINGS_MAX} "
            f"settings, not of step {step} with {len(settings)}"
        )
    for name, value in settings.items():
        if max(len(name), len(str(value))) > FORK_SETTING_MAX:
            raise InvalidRequestError(
                f"setting {name[:60]!r} of a fork is longer than {FORK_SETTING_MAX} characters: "
                "name a file instead"
            )


def seen(context: Context, job: Job, now: float) -> None:
    """The job's controller is alive; a detached job is attached again."""
    job.seen_at = now
    if not job.attached:
        job.attached = True
        context.cluster.holdings.detached.pop(job.job, None)
        resume(context, job, now)
        context.effects.wake(now + job.controller_timeout_s, timers.silence(job.job))


def resume(context: Context, job: Job, now: float) -> None:
    """Enqueue the deployments of a job that was set aside and has a controller again."""
    if not job.is_set_aside:
        return
    job.is_set_aside = False
    begin_to_wait(
        context.cluster.holdings, context.cluster.queues.waiting.by_tenant, job.tenant, now
    )
    for deployment in map(context.state.deployment, job.deployments):
        if deployment.wpg.state == WpgState.WAITING:
            context.cluster.queues.wait(deployment)
            for node in deployment.wpg.stored.nodes:
                # A node may have been lost in the meantime.
                context.effects.wake(now, timers.node_check(node))
    context.cluster.queues.waiting.retry_all()


def controller_seen(context: Context, event: ControllerSeen, now: float) -> None:
    """Handle a heartbeat."""
    job = find_live_job(context.state, event.job)
    check_controller(job, event.controller)
    seen(context, job, now)


def controller_attached(context: Context, event: ControllerAttached, now: float) -> None:
    """Make a process the job's controller."""
    if not event.controller:
        raise InvalidRequestError("attach a job with a controller token: it is empty")
    job = find_live_job(context.state, event.job)
    take_over(context.step(now), job, event.controller, keep_gradients=event.keep_gradients)
    seen(context, job, now)


def take_over(
    step: Step,
    job: Job,
    controller: str,
    *,
    keep_gradients: bool = False,
) -> None:
    """Make the controller with this token the job's only one; a repeated call changes nothing.

    Gradients that wait for a step are dropped unless `keep_gradients`: a new controller may not
    expect them, and they would be added to its own.
    """
    state = step.state
    if job.controller == controller:
        return
    job.controller = controller
    # Agents of the former controller must not generate for the new one, which makes its own keys.
    job.keys = []
    if not keep_gradients:
        for name in job.deployments:
            deployment = state.deployment(name)
            if gradients_to_come(state, deployment):
                enqueue_zero_grad(step, deployment)


def failure_acknowledged(state: State, event: FailureAcknowledged, now: float) -> None:
    """Acknowledge a failure; one that was acknowledged before changes nothing."""
    del now
    failed: list[OperationId] = []
    if event.operation is not None:
        operation = find_operation(state, event.operation)
        deployment = find_deployment(state, operation.deployment)
        failed.append(root_of(operation))
    elif event.deployment is not None:
        deployment = find_deployment(state, event.deployment)
        failed += [failure.operation for failure in deployment.work.unacknowledged]
    else:
        raise InvalidRequestError("name the operation that failed, or the deployment it halts")
    job = find_job(state, deployment.job)
    check_controller(job, event.controller)
    acknowledge(state, job, failed)


def job_key_added(context: Context, event: JobKeyAdded, now: float) -> None:
    """Add an API key to a job. It is valid until the job ends or has another controller.

    Raises:
        UnknownJobError: there is no such job.
        JobEndedError: the job has ended.
        ControllerReplacedError: another controller has attached the job.
    """
    del now
    job = find_job(context.state, event.job)
    if job.state.is_final:
        raise JobEndedError(
            f"job {event.job!r} is {job.state.value}, and gets no API keys: create another job"
        )
    check_controller(job, event.controller)
    if event.key_digest not in job.keys:
        job.keys = [*job.keys, event.key_digest][-JOB_KEYS_MAX:]


def job_keys_revoked(context: Context, event: JobKeysRevoked, now: float) -> None:
    """Remove the API keys of a job. Raises `UnknownJobError`, `ControllerReplacedError`."""
    del now
    job = find_job(context.state, event.job)
    check_controller(job, event.controller)
    job.keys = []


def job_finished(context: Context, event: JobFinished, now: float) -> None:
    """End or detach a job. A job with an unacknowledged failure does not end as completed but as
    failed. A detached job continues as if its controller had timed out.

    Raises:
        OverloadedError: a scheduled checkpoint of a job to complete is not pinned yet.
    """
    job = find_job(context.state, event.job)
    if event.outcome not in OUTCOMES:
        known = ", ".join(sorted(OUTCOMES))
        raise InvalidRequestError(f"outcome {event.outcome!r} is unknown: use {known}")
    if job.state.is_final:
        return
    check_controller(job, event.controller)
    if event.outcome == DETACHED:
        # Not later than it was: who reports an absent controller is not that controller.
        job.seen_at = min(job.seen_at, now - job.controller_timeout_s)
        detach(context.cluster, job)
        detach_or_cancel(context, job, now)
        return
    outcome, reason = event.outcome, event.reason
    failure = job_failure(context.state, job)
    if failure is not None and outcome == "completed":
        outcome = "failed"
        message = read_error(failure.error).message
        reason = f"its controller did not acknowledge that {failure.operation} failed: {message}"
    if outcome == "completed":
        check_saved(context.state, map(context.state.deployment, job.deployments))
    end_job(context, job, ENDINGS[outcome], reason, now)
