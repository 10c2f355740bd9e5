"""Life of jobs and WPGs: placement, launch, restart, end; and routers' connections."""

from typing import Final

from plexrl.errors import (
    CapacityError,
    InvalidRequestError,
    OperationCancelledError,
    PlexRLError,
    StorageFullError,
)
from plexrl.scheduler.accounting.earlier_jobs import (
    prior_of,
    remember_length,
    shape_key,
    take_prior,
)
from plexrl.scheduler.accounting.profiler import forget_open_cycle, waiting_part
from plexrl.scheduler.accounting.retention import last_incarnation
from plexrl.scheduler.accounting.sharing import note_wait
from plexrl.scheduler.accounting.usage import discard, meter
from plexrl.scheduler.jobs.quoted_jobs import remember_quote
from plexrl.scheduler.operations.deadlines.bounds import watch
from plexrl.scheduler.operations.deadlines.cancellation import early_end, is_over
from plexrl.scheduler.operations.operations import abort, fail_operation, interrupt
from plexrl.scheduler.operations.replay import drop_log, drop_past
from plexrl.scheduler.operations.submission.queue_order import return_to_queue
from plexrl.scheduler.placement.capacity.overlaps import follow
from plexrl.scheduler.placement.cluster import Cluster, Context, hold
from plexrl.scheduler.placement.placement import release_lock, vacate
from plexrl.scheduler.placement.rendezvous import (
    may_span,
    meets_at_port,
    no_port_reason,
    rendezvous,
    take_port,
)
from plexrl.scheduler.rules.settings import Settings, Situation, Step
from plexrl.scheduler.state.job import change_job
from plexrl.scheduler.state.machines.job_states import JobState, JobTrigger
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.messages.events import (
    DeploymentRelaid,
    Event,
    RouterJoined,
    RouterLost,
)
from plexrl.scheduler.state.operation import change_operation
from plexrl.scheduler.state.records import Deployment, Job, State
from plexrl.wire.messages import (
    LaunchWorkers,
    RankPlacement,
    ReleaseState,
    StopWorkers,
)

_ADMITTED: Final = JobState.ADMITTED
_DEVICE: Final = Residency.DEVICE

RETRY_LAUNCH_S = 2.0
"""Pause between two launches that find no free disk space, or no free port."""

LOSSES_FACTOR = 10
"""Losses of a WPG without new work, as a multiple of `launch_attempts`, after which its job fails:
each may have been at another operation of a long repetition."""

ENDINGS = {
    "completed": JobTrigger.COMPLETED,
    "failed": JobTrigger.FAILED,
    "cancelled": JobTrigger.CANCELLED,
}


def end_job(context: Context, job: Job, trigger: JobTrigger, reason: str, now: float) -> None:
    """End a job, and release everything it holds."""
    state = context.state
    change_job(job, trigger)
    job.reason = reason
    job.ended_at = now
    state.ended[job.job] = None
    context.cluster.holdings.count_live_job(job.tenant, -1)
    if trigger is JobTrigger.COMPLETED:
        remember_length(context, job, now)
        remember_quote(state, job, now)
    job.attached = False
    context.cluster.holdings.detached.pop(job.job, None)
    for name in job.deployments:
        deployment = state.deployment(name)
        if deployment.placement.groups and deployment.work.queue:
            note_wait(state, deployment, now)
    why = f": {job.reason}" if job.reason else ""
    error = OperationCancelledError(
        f"the job {job.job!r} ended ({job.state.lower()}) before this operation did{why}",
        job=job.job,
    )
    for name in job.deployments:
        end_deployment(context, state.deployment(name), error, now)
    context.cluster.queues.waiting.retry_all()


def end_deployment(
    context: Context, deployment: Deployment, error: PlexRLError, now: float
) -> None:
    """Release everything that a deployment holds; what it has not done fails with `error`."""
    state, cluster, effects = context.state, context.cluster, context.effects
    step = context.step(now)
    meter(state, deployment, now)
    unfinished = [*deployment.work.running, *deployment.work.queue]
    if deployment.wpg.moving is not None:
        unfinished.append(deployment.wpg.moving.operation)
    deployment.work.drop()
    effects.for_stored.pop(deployment.deployment, None)
    deployment.wpg.end_move()
    for name in unfinished:
        operation = state.operations[name]
        if not operation.state.is_final:
            fail_operation(step, operation, error)
    drop_log(step, deployment)
    drop_past(step, deployment)
    nodes = deployment.placement.nodes
    if deployment.wpg.processes.incarnation:
        effects.emit(
            StopWorkers(
                deployment=deployment.deployment,
                incarnation=deployment.wpg.processes.incarnation,
                nodes=nodes,
            )
        )
        kept = tuple(sorted({*nodes, *deployment.wpg.stored.nodes, *deployment.wpg.reader_nodes}))
        effects.emit(ReleaseState(deployment=deployment.deployment, nodes=kept))
    cluster.queues.stop_waiting(deployment.deployment)
    cluster.unmeasured.remove(deployment)
    if deployment.placement.groups:
        hold(cluster, deployment, -1, now)
        effects.touch_all(vacate(cluster, deployment, now))
    deployment.wpg.end()
    # What no query needs would be part of every snapshot.
    forget_open_cycle(deployment)
    deployment.demand.cycles.end(waiting_part(deployment.demand.cycles.measured))


def has_all_gpus(state: State, job: Job) -> bool:
    """Whether all deployments of the job have GPUs. Fillers need none of their own."""
    deployments = map(state.deployment, job.deployments)
    return all(
        deployment.spec.preemptible or deployment.placement.group is not None
        for deployment in deployments
    )


def all_placed(situation: Situation, job: Job) -> None:
    """All deployments of the job have GPUs."""
    state = situation.state
    change_job(job, JobTrigger.PLACED)
    if job.state is _ADMITTED:
        for name in job.deployments:
            deployment = state.deployment(name)
            if deployment.wpg.residency is _DEVICE:
                # It was loaded while another deployment of the job waited for GPUs.
                granted(situation, deployment)


def granted(situation: Situation, deployment: Deployment) -> None:
    """The state of a WPG is on the GPUs: its job runs, if this is the WPG that the job's state
    follows. A job that has been profiled before is not profiled again."""
    state = situation.state
    job = state.jobs[deployment.job]
    if deployment.spec.kind == "train" or all(
        state.deployment(name).spec.kind != "train" for name in job.deployments
    ):
        change_job(job, JobTrigger.GRANTED)
        had_a_cycle = (
            not situation.settings.policy.repacks and deployment.demand.burst.ended_at is not None
        )
        if deployment.demand.has_own_trace or had_a_cycle:
            change_job(job, JobTrigger.CYCLE_ENDED)


def launch(step: Step, deployment: Deployment) -> None:
    """Start the next incarnation of the WPG's processes, if all its nodes are connected. Without a
    free port at which they could meet, the start is retried."""
    state, effects, now = step.state, step.effects, step.now
    port = 0
    if meets_at_port(state, deployment):
        port = take_port(state, deployment)
        if not port:
            deployment.wpg.backoff.report(
                CapacityError.code, no_port_reason(state, deployment), now
            )
            _launch_later(effects, deployment, now)
            return
    before = deployment.wpg.processes.incarnation or last_incarnation(state, deployment.deployment)
    deployment.wpg.processes.begin_launch(before, port)
    send_launch(step, deployment)


def _launch_later(effects: Effects, deployment: Deployment, now: float) -> None:
    launch_at = now + RETRY_LAUNCH_S
    deployment.wpg.processes.delay_launch(launch_at)
    effects.wake(launch_at, timers.launch(deployment.deployment))


def has_gpu(state: State, rank: RankPlacement) -> bool:
    """Whether the rank's node is connected, and still has that GPU."""
    node = state.nodes[rank.node]
    return node.alive and rank.gpu < node.gpus


def send_launch(step: Step, deployment: Deployment) -> None:
    """Send, or send again, the launch of the present incarnation; nothing while a launch waits."""
    state, effects, now = step.state, step.effects, step.now
    if deployment.wpg.processes.launch_at is not None:
        return
    if not all(has_gpu(state, rank) for rank in deployment.placement.ranks):
        return
    if not may_span(state, deployment):
        return
    assert deployment.placement.group is not None, f"{deployment.deployment} launches without GPUs"
    deployment.wpg.processes.order_launch(now)
    if not deployment.work.watch_at and state.overdue_s:
        watch(step, deployment)
    effects.emit(
        LaunchWorkers(
            deployment=deployment.deployment,
            tenant=state.job(deployment.job).tenant,
            kind=deployment.spec.kind,
            incarnation=deployment.wpg.processes.incarnation,
            group=deployment.placement.group,
            ranks=deployment.placement.ranks,
            spec_json=deployment.spec.spec_json,
            rendezvous=rendezvous(state, deployment),
        )
    )


def restart(
    context: Context, deployment: Deployment, reason: str, now: float, *, counts: bool = True
) -> None:
    """Restart the WPG from its last complete version; other members use its group meanwhile."""
    if stop(context, deployment, reason, now, counts=counts):
        launch(context.step(now), deployment)


def relayout(cluster: Cluster, deployment: Deployment, event: DeploymentRelaid) -> bool:
    """Divide a rollout's GPUs in another way. Returns whether it has processes, which are of the
    former layout.

    Raises:
        InvalidRequestError: it is no rollout deployment.
    """
    if deployment.spec.kind != "rollout":
        raise InvalidRequestError(
            f"{deployment.deployment!r} is a {deployment.spec.kind} deployment: only the layout of "
            "a rollout deployment can change"
        )
    if deployment.spec.spec_json == event.spec_json:
        return False
    cluster.unmeasured.remove(deployment)
    deployment.spec.change_layout(event.spec_json)
    deployment.demand.relayout(event.memory, event.state_bytes)
    cluster.capacity.inventory.resize(deployment, event.state_bytes)
    _change_prior(cluster, deployment)
    return deployment.wpg.state in (WpgState.LAUNCHING, WpgState.READY, WpgState.RECOVERING)


def _change_prior(cluster: Cluster, deployment: Deployment) -> None:
    """The deployment has another shape: replace the prior of the former one."""
    cluster.unmeasured.add(deployment)
    if not cluster.unmeasured.has(deployment):
        return
    take_prior(deployment, prior_of(cluster, shape_key(deployment)))
    if deployment.deployment in cluster.queues.waiting:
        cluster.queues.demand_changed(deployment)
    elif deployment.placement.reservation is not None:
        follow(cluster.capacity, deployment)


def restart_when_there_is_room(
    context: Context, deployment: Deployment, reason: str, now: float
) -> None:
    """As `restart`, for processes that ended because a file system was full. It counts as no
    failure of the WPG, and is retried without limit."""
    if stop(context, deployment, reason, now, counts=False):
        deployment.wpg.backoff.report(StorageFullError.code, reason, now)
        _launch_later(context.effects, deployment, now)


def launch_if_due(step: Step, deployment: Deployment) -> None:
    """Start the processes that waited for free disk space, or for a port."""
    now = step.now
    at = deployment.wpg.processes.launch_at
    starts = deployment.wpg.state in (WpgState.LAUNCHING, WpgState.RECOVERING)
    if at is not None and now >= at and starts:
        launch(step, deployment)


def stop(
    context: Context, deployment: Deployment, reason: str, now: float, *, counts: bool = True
) -> bool:
    """Stop the WPG's processes, and queue its runs again. `counts`: it counts as a failure of the
    WPG. False: there were too many failures, and the job has ended."""
    state = context.state
    job = state.job(deployment.job)
    deployment.wpg.processes.end(reason)
    if counts:
        deployment.wpg.processes.fail(deployment.work.running)
    interrupted = deployment.work.new_runs
    deployment.work.end_runs()
    for name in interrupted:
        operation = state.operations[name]
        change_operation(operation, OperationTrigger.REQUEUED)
        operation.started_at = None
        discard(operation)
    # These must not run again: cancelled, or past a deadline whose timer has fired.
    over = [name for name in interrupted if is_over(state.operations[name], now)]
    for name in over:
        operation = state.operations[name]
        fail_operation(context.step(now), operation, early_end(operation, now))
    for name in reversed(interrupted):
        if name not in over:
            return_to_queue(state, deployment, state.operations[name])
    if deployment.wpg.moving is not None:
        # A new move, with a new name, is made when it is needed.
        del state.operations[deployment.wpg.moving.operation]
        deployment.wpg.end_move()
    losses = _too_many_losses(context.settings, deployment)
    if losses is not None:
        end_job(context, job, JobTrigger.FAILED, f"{losses}; the last time: {reason}", now)
        return False
    deployment.work.replay.end_replay()
    forget_open_cycle(deployment)
    if deployment.work.queue:
        deployment.demand.burst.want(now)
    deployment.demand.burst.interrupt()
    context.effects.touch_all(release_lock(state, deployment))
    context.effects.emit(
        StopWorkers(
            deployment=deployment.deployment,
            incarnation=deployment.wpg.processes.incarnation,
            nodes=deployment.placement.nodes,
        )
    )
    deployment.wpg.interrupt()
    return True


def _too_many_losses(settings: Settings, deployment: Deployment) -> str | None:
    """Why the WPG is not launched again; None: it is."""
    processes, attempts = deployment.wpg.processes, settings.config.launch_attempts
    lost = f"the workers of {deployment.deployment!r} were lost"
    if processes.failures > attempts:
        found = ", ".join(repr(name) for name in processes.suspects[:3])
        when = f"while they executed {found}" if found else "before they executed an operation"
        return f"{lost} {processes.failures} times in a row {when}"
    if processes.losses > LOSSES_FACTOR * attempts:
        return f"{lost} {processes.losses} times without completing an operation"
    return None


def worker_ready(
    effects: Effects, deployment: Deployment, rank: int, address: str, now: float
) -> None:
    """A worker of the present incarnation is ready."""
    if deployment.wpg.processes.add(rank, address) < deployment.spec.workers:
        return
    deployment.wpg.processes.connect()
    if not deployment.wpg.is_ready:
        deployment.wpg.connect(now)
        effects.touch_all(deployment.placement.groups)
        if not deployment.work.queue and not deployment.work.replay.log:
            deployment.wpg.backoff.clear()
        if now < deployment.wpg.backoff.until and deployment.placement.group is not None:
            # The timer that was set may name another group.
            effects.wake(
                deployment.wpg.backoff.until, timers.group_step(deployment.placement.group)
            )


def router_joined(context: Context, event: RouterJoined, now: float) -> None:
    """A router connected: it gets all runs in flight."""
    routers = context.state.routers
    if event.router not in routers:
        routers.append(event.router)
    issue_again(context.step(now))


def router_lost(context: Context, event: RouterLost, now: float) -> None:
    """A router was lost: another gets all runs in flight."""
    routers = context.state.routers
    if event.router in routers:
        routers.remove(event.router)
        if routers:
            issue_again(context.step(now))


def excuse_silence(state: State, event: Event, now: float) -> None:
    """Count the silence of attached controllers anew: the scheduler received no heartbeats while it
    was down. A job whose controller was gone before has the time that was left to it."""
    del event
    state.issued_at = state.resumed_at = now


def detach(cluster: Cluster, job: Job) -> None:
    """The job has no controller: its GPUs may go to jobs that wait."""
    job.attached = False
    if not job.is_set_aside:
        cluster.holdings.detached[job.job] = None
    cluster.queues.waiting.retry_all_if_any()


def detach_or_cancel(context: Context, job: Job, now: float) -> None:
    """Apply the timeouts of the job's controller."""
    if job.state.is_final:
        return
    if job.attached:
        gone_at = heard_at(context.state, job) + job.controller_timeout_s
        if now < gone_at:
            context.effects.wake(gone_at, timers.silence(job.job))
            return
    detach(context.cluster, job)
    cancelled_at = cancelled_without_controller_at(job)
    if now < cancelled_at:
        context.effects.wake(cancelled_at, timers.silence(job.job))
        return
    end_job(
        context,
        job,
        JobTrigger.CANCELLED,
        f"its controller was silent for {now - job.seen_at:.0f} s and did not come back",
        now,
    )


def heard_at(state: State, job: Job) -> float:
    """From when the silence of the job's controller counts."""
    return max(job.seen_at, state.resumed_at)


def cancelled_without_controller_at(job: Job) -> float:
    """When a detached job is cancelled, unless a controller attaches it before."""
    return job.seen_at + job.controller_timeout_s + job.reattach_timeout_s


def issue_again(step: Step) -> None:
    """Send all runs in flight again: the router that had them may be gone."""
    state, effects = step.state, step.effects
    state.issued_at = step.now
    for deployment in state.deployments.values():
        if deployment.wpg.moving is not None:
            effects.emit(deployment.wpg.moving)
        for command in deployment.work.running.values():
            operation = state.operations[command.operation]
            if operation.stopped_rows:
                abort(effects, command, operation.stopped_rows)
            effects.emit(command)
            if operation.is_aborted:
                abort(effects, command)
            elif operation.is_interrupted:
                interrupt(effects, command)
