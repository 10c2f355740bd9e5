"""Handlers of finished and failed runs."""

from typing import Final

from plexrl.errors import (
    ConflictError,
    DeviceMemoryFullError,
    InvalidRequestError,
    NonFiniteWeightsError,
    PayloadLostError,
    PlexRLError,
    is_storage_held,
)
from plexrl.ids import FencingToken
from plexrl.scheduler.accounting.usage import bill_run, discard, meter_run
from plexrl.scheduler.dispatch.bursts import end_burst
from plexrl.scheduler.dispatch.group_step import GroupStep
from plexrl.scheduler.jobs.lifecycle import (
    end_job,
    granted,
    restart,
    restart_when_there_is_room,
)
from plexrl.scheduler.operations.deadlines.cancellation import early_end, is_over
from plexrl.scheduler.operations.failures import read_error
from plexrl.scheduler.operations.held.holding import delay, hold, is_held, requeue
from plexrl.scheduler.operations.held.unreturned_memory import keepers, named_holders
from plexrl.scheduler.operations.operations import (
    complete_operation,
    fail_operation,
    finish_operation,
)
from plexrl.scheduler.operations.replay import retire_log
from plexrl.scheduler.operations.submission.lost_payloads import (
    draw_again,
    is_awaited,
    may_have_run,
)
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.recovery.rebuilding import LOST_CODES, fall_back, publish_again
from plexrl.scheduler.recovery.relocation import cancel_move
from plexrl.scheduler.rules.limits import within_limits
from plexrl.scheduler.rules.lookups import owner_of
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.rules.switch_cost import HOST, observe_move, record_tier, round_trip_s
from plexrl.scheduler.state import group_lock
from plexrl.scheduler.state.deployment.wpg.backoff import BACKOFF_S_MAX
from plexrl.scheduler.state.job import change_job
from plexrl.scheduler.state.machines.job_states import JobTrigger
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.messages.events import OperationFailed, OperationFinished
from plexrl.scheduler.state.operation import Operation, change_operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationKind

BACK_OFF_S = 2.0
"""Back-off after a context switch that failed."""

REFUSED_STORED = LOST_CODES | {ConflictError.code}
"""Errors of a run on the stored state that do not arise once the state is loaded."""

REFUSED_LOAD_FACTOR = 10.0
"""Longest pause between two refused loads, as a multiple of a switch there and back, in a group
with other members: each attempt takes the GPUs from them."""

SNAPSHOT_BACK_OFF_S = 30.0
"""Back-off after a snapshot that found no free space; training continues meanwhile."""

_OFFLOADED: Final = Residency.OFFLOADED
_LOAD: Final = OperationKind.LOAD
_OFFLOAD: Final = OperationKind.OFFLOAD
_OPTIM_STEP: Final = OperationKind.OPTIM_STEP
_PUBLISH: Final = OperationKind.PUBLISH
_SUSPENDS: Final = JobTrigger.OFFLOADED


def run_finished(context: Context, event: OperationFinished, now: float) -> None:
    """Handle a completed run; a late report of another run changes nothing."""
    state, event = context.state, within_limits(event)
    name = event.operation
    operation = state.operations.get(name)
    deployment = None if operation is None else _at_work(state, operation, event.token)
    if operation is None or deployment is None:
        return
    step = context.step(now)
    meter_run(state, deployment, operation, now)
    work, wpg, demand = deployment.work, deployment.wpg, deployment.demand
    operation.payload_lost_at = None
    if event.trainer_step is not None:
        work.advance_to(event.trainer_step)
    command = work.end_run(name)
    if command is None:
        _move_finished(context, deployment, operation, event, now)
    elif event.unfinished_rows and operation.is_interrupted and not is_over(operation, now):
        _interrupted(step, deployment, operation, event)
    else:
        has_stored = wpg.residency is _OFFLOADED and operation.kind is _OPTIM_STEP
        if has_stored:
            demand.estimates.observe_stored_step(event.compute_s)
        else:
            demand.estimates.observe(operation.kind, operation.tokens, event.compute_s)
        if event.peak_bytes:
            demand.observe_peak(event.peak_bytes)
        if wpg.backoff.code:
            _met_no_condition(deployment)
        if command.replay:
            work.replay.replayed(name)
            if wpg.no_snapshot_until:
                # The last snapshot found no free space: new work runs before the next attempt.
                wpg.delay_snapshots(now + SNAPSHOT_BACK_OFF_S)
        else:
            # Only new work counts as progress. Else an operation that kills its worker would be
            # retried for ever, since loads and replays succeed.
            wpg.processes.succeed()
            complete_operation(step, deployment, operation, event)
            if operation.kind is _OPTIM_STEP:
                demand.burst.step(now)
        if has_stored:
            # The workers have stored what the step made.
            _version_made(step, deployment, event)
        if not work.running and wpg.residency is not _OFFLOADED:
            demand.burst.pause(now)
        if operation.kind == _PUBLISH:
            _published(step, deployment)
        elif operation.ends_burst and not command.replay and not has_stored:
            _burst_over(step, deployment)
    dirty = step.effects.dirty
    for group in deployment.placement.groups:
        dirty[group] = None


def _met_no_condition(deployment: Deployment) -> None:
    """A run met no condition. A run on the stored state needs no device memory, so it says nothing
    of a load that found too little."""
    wpg = deployment.wpg
    if wpg.residency is not _OFFLOADED or wpg.backoff.code != DeviceMemoryFullError.code:
        wpg.backoff.clear()


def _interrupted(
    step: Step,
    deployment: Deployment,
    operation: Operation,
    event: OperationFinished,
) -> None:
    """A run of a generation was interrupted: it is continued from what it has drawn."""
    state = step.state
    step.effects.discard(operation.partial)
    operation.partial = event.result
    operation.interruptions += 1
    bill_run(state, deployment, operation)
    deployment.wpg.processes.succeed()
    deployment.wpg.backoff.clear()
    requeue(state, deployment, operation, step.now)


def run_failed(context: Context, event: OperationFailed, now: float) -> None:
    """Handle a run that did not complete."""
    state, step = context.state, context.step(now)
    operation = state.operations.get(event.operation)
    deployment = None if operation is None else _at_work(state, operation, event.token)
    if operation is None or deployment is None:
        return
    meter_run(state, deployment, operation, now)
    error = read_error(event.error)
    moving = deployment.wpg.moving
    if is_storage_held(error.code) and not event.state_intact:
        # Some ranks may have done a part of it: all ranks repeat it from the state before.
        if moving is not None and operation.kind == OperationKind.SNAPSHOT:
            deployment.wpg.delay_snapshots(now + SNAPSHOT_BACK_OFF_S)
        restart_when_there_is_room(context, deployment, error.message, now)
    elif moving is not None and moving.operation == event.operation:
        _move_failed(context, deployment, operation, error, now, is_intact=event.state_intact)
    elif isinstance(error, PayloadLostError) and may_have_run(state, deployment, operation):
        restart(context, deployment, error.message, now, counts=False)
    elif deployment.work.running[event.operation].replay:
        _replay_failed(context, deployment, operation, error, now, is_intact=event.state_intact)
    elif not draw_again(step, deployment, operation, error):
        deployment.work.end_run(event.operation)
        _new_work_failed(context, deployment, operation, error, now, is_intact=event.state_intact)


def _replay_failed(
    context: Context,
    deployment: Deployment,
    operation: Operation,
    error: PlexRLError,
    now: float,
    *,
    is_intact: bool,
) -> None:
    """An operation that is repeated after a loss failed: it was accepted, so it is tried again."""
    state, step, name = context.state, context.step(now), operation.operation
    if publish_again(step, deployment, operation, error):
        return
    if is_held(error, state_intact=is_intact) or is_awaited(state, operation, error, now):
        deployment.work.end_run(name)
        hold(step, deployment, operation, error)
    elif isinstance(error, PayloadLostError):
        reason = f"{deployment.deployment!r} cannot be computed again: {error.message}"
        end_job(context, state.job(deployment.job), JobTrigger.FAILED, reason, now)
    else:
        restart(context, deployment, f"replaying {name!r}: {error.message}", now)


def _new_work_failed(
    context: Context,
    deployment: Deployment,
    operation: Operation,
    error: PlexRLError,
    now: float,
    *,
    is_intact: bool,
) -> None:
    """An operation failed in its first run: it waits for what it lacks, or fails."""
    state, effects, step = context.state, context.effects, context.step(now)
    if deployment.wpg.residency is _OFFLOADED and _needs_load(operation, error, is_intact):
        if not is_over(operation, now):
            # The load finds another version or rebuilds this one, and needs no space for a copy.
            operation.needs_load = True
            requeue(state, deployment, operation, now)
            effects.touch_all(deployment.placement.groups)
            return
        error = early_end(operation, now)
    if is_held(error, state_intact=is_intact) or is_awaited(state, operation, error, now):
        if not is_over(operation, now):
            hold(step, deployment, operation, error)
            return
        discard(operation)
        error = early_end(operation, now)
    else:
        _met_no_condition(deployment)
        may_repeat = is_intact and not is_over(operation, now)
        if may_repeat and publish_again(step, deployment, operation, error):
            return
    fail_operation(step, operation, error)
    if is_intact:
        deployment.wpg.processes.succeed()
        if not deployment.work.running:
            _wait_after_failure(deployment, now)
        effects.touch_all(deployment.placement.groups)
    else:
        # Workers that report non-finite weights are intact; only their state is not.
        counts = not isinstance(error, NonFiniteWeightsError)
        restart(context, deployment, error.message, now, counts=counts)


def _wait_after_failure(deployment: Deployment, now: float) -> None:
    """The last run of a deployment failed: what is left of its queue waits for the group now."""
    if deployment.wpg.residency is not _OFFLOADED:
        deployment.demand.burst.pause(now)
    if deployment.work.queue:
        deployment.demand.burst.want(now)


def _needs_load(operation: Operation, error: PlexRLError, is_intact: bool) -> bool:
    """Whether a run on the stored state is to be repeated once the state is loaded. A step that
    changed nothing always is: under the lock it needs less."""
    if operation.kind is _OPTIM_STEP and is_intact:
        return True
    return error.code in REFUSED_STORED


def _move_failed(
    context: Context,
    deployment: Deployment,
    operation: Operation,
    error: PlexRLError,
    now: float,
    *,
    is_intact: bool,
) -> None:
    state = context.state
    group = _group_of(state, deployment)
    is_load = operation.kind == OperationKind.LOAD
    if is_load and error.code in LOST_CODES:
        if fall_back(state, deployment):
            restart(context, deployment, error.message, now, counts=False)
            return
        reason = (
            f"the state of {deployment.deployment!r} cannot be loaded, nor recomputed from "
            f"the operations that were kept: {error.message}"
        )
        discard(operation)
        end_job(context, state.job(deployment.job), JobTrigger.FAILED, reason, now)
    elif is_load and isinstance(error, InvalidRequestError):
        # The model or layout is invalid, or a library is not installed.
        reason = f"{deployment.deployment!r} cannot be built: {error.message}"
        end_job(context, state.job(deployment.job), JobTrigger.FAILED, reason, now)
    else:
        if is_intact:
            _move_called_off(context, deployment, operation, error, now)
        elif isinstance(error, DeviceMemoryFullError):
            # Some ranks had memory and have loaded. No fault of this deployment refused the others.
            restart(context, deployment, error.message, now, counts=False)
            delay(
                deployment,
                error,
                now,
                _longest_pause_s(state, group, deployment, operation.kind),
            )
        else:
            restart(context, deployment, error.message, now)
        for keeper, reason in keepers(state, group, error):
            restart(context, keeper, reason, now, counts=False)


def _longest_pause_s(
    state: State, group: Group, deployment: Deployment, kind: OperationKind
) -> float:
    """Longest pause between two refused moves of this kind."""
    if kind != OperationKind.LOAD or len(group.members) + len(group.fillers) == 1:
        return BACKOFF_S_MAX
    return max(BACKOFF_S_MAX, REFUSED_LOAD_FACTOR * round_trip_s(state, deployment))


def _at_work(state: State, operation: Operation, token: FencingToken) -> Deployment | None:
    """The deployment that runs the operation under this token; None if there is none."""
    if operation.token != token:
        return None
    deployment = owner_of(state, operation)
    if deployment is None:
        return None
    name, moving = operation.operation, deployment.wpg.moving
    if moving is None:
        if name not in deployment.work.running:
            return None
    elif moving.operation != name and name not in deployment.work.running:
        return None
    assert deployment.placement.groups, f"{name} is in flight without a group"
    return deployment


def _group_of(state: State, deployment: Deployment) -> Group:
    assert deployment.placement.group is not None, f"{deployment.deployment} moves without a group"
    return state.groups[deployment.placement.group]


def _move_finished(
    context: Context,
    deployment: Deployment,
    operation: Operation,
    event: OperationFinished,
    now: float,
) -> None:
    state, step = context.state, context.step(now)
    deployment.wpg.end_move()
    began_at = operation.started_at if operation.started_at is not None else now
    finish_operation(step, deployment, operation, event)
    kind = operation.kind
    if kind == _LOAD:
        if deployment.wpg.backoff.code == DeviceMemoryFullError.code:
            deployment.wpg.backoff.clear()
        observe_move(state, deployment, operation, event)
        deployment.wpg.end_load()
        deployment.demand.switch_times.end(now)
        deployment.work.replay.begin_replay()
        # Without work the load was made in anticipation, and no burst begins.
        if deployment.work.queue or deployment.work.replay.replaying:
            deployment.demand.burst.begin_loaded(now)
        else:
            deployment.demand.burst.stay_over()
        group_lock.count_load(state, deployment, now - began_at)
        granted(step, deployment)
    elif kind == _OFFLOAD:
        observe_move(state, deployment, operation, event)
        _version_made(step, deployment, event)
        deployment.wpg.end_offload()
        group_lock.count_offload(state, deployment, now - began_at)
        if deployment.spec.kind == "train":
            change_job(state.jobs[deployment.job], _SUSPENDS)
        _hand_over(context, deployment, now)
    else:
        deployment.demand.estimates.observe(kind, operation.tokens, event.compute_s)
        _version_made(step, deployment, event)
        deployment.wpg.allow_snapshots()
        deployment.demand.burst.pause(now)


def _version_made(
    step: Step,
    deployment: Deployment,
    event: OperationFinished,
) -> None:
    former_seq = deployment.work.replay.store()
    deployment.wpg.stored.move_to(deployment.placement.nodes)
    moved = event.moved
    record_tier(deployment, HOST if moved is None else moved.tier)
    if former_seq < deployment.work.replay.durable_seq:
        retire_log(step, deployment, former_seq)


def _hand_over(context: Context, former: Deployment, now: float) -> None:
    """The former holder is offloaded: the locks go to the incoming members that are still ready and
    have all theirs."""
    state = context.state
    for group in state.groups_of(former):
        group_step = GroupStep(context, group, now)
        incoming = group_step.successor()
        if incoming is None or incoming.deployment != group.incoming:
            _end_switch(context, group)
        if incoming is None:
            group_lock.release(group)
            continue
        if incoming.deployment != group.incoming:
            # Another one takes its place.
            group_lock.begin_switch(state, incoming)
        if incoming.placement.spans:
            group_lock.vacate(group)
            if any(group.holder is not None for group in state.groups_of(incoming)):
                continue
        group_lock.hand_over(state, incoming)
        if former.placement.spans and not incoming.placement.spans:
            group_lock.fence(state, [group])
        group_step.load(incoming, former if former.spec.preemptible else None)


def _end_switch(context: Context, group: Group) -> None:
    """The incoming member does not get the lock."""
    if group.incoming is not None:
        incoming = context.state.deployments[group.incoming]
        group_lock.end_switch(context.state, incoming)
        context.effects.touch_all(incoming.placement.groups)


def _move_called_off(
    context: Context,
    deployment: Deployment,
    operation: Operation,
    error: PlexRLError,
    now: float,
) -> None:
    """A move changed nothing. The deployment that needed it waits for a back-off."""
    state, effects = context.state, context.effects
    group = _group_of(state, deployment)
    deployment.wpg.end_move()
    change_operation(operation, OperationTrigger.FAILED)
    del state.operations[operation.operation]
    held_back = deployment
    if operation.kind == OperationKind.LOAD:
        deployment.demand.switch_times.end(now)
        deployment.wpg.refuse_load(is_first=not deployment.work.replay.durable_seq)
        for each in state.groups_of(deployment):
            group_lock.release(each)
    else:
        deployment.demand.burst.pause(now)
        if operation.kind == OperationKind.OFFLOAD:
            deployment.wpg.refuse_offload()
            for each in state.groups_of(deployment):
                if each.incoming is not None:
                    held_back = state.deployments[each.incoming]
                    held_back.demand.switch_times.end(now)
                    group_lock.end_switch(state, held_back)
                    effects.touch_all(held_back.placement.groups)
    effects.touch_all(deployment.placement.groups)
    if operation.kind == OperationKind.SNAPSHOT:
        deployment.wpg.delay_snapshots(now + SNAPSHOT_BACK_OFF_S)
        return
    if deployment.wpg.moves.planned is not None:
        cancel_move(context.cluster.queues, deployment, now)
        for node in deployment.placement.nodes:
            effects.wake(deployment.wpg.moves.not_before, timers.node_check(node))
        if operation.kind == OperationKind.OFFLOAD and held_back is deployment:
            # No member waits for the group: the holder continues.
            return
    if held_back.work.queue and is_held(error, state_intact=True):
        delay(held_back, error, now, _longest_pause_s(state, group, held_back, operation.kind))
    else:
        named = named_holders(held_back, error)
        held_back.wpg.backoff.wait(now + BACK_OFF_S, error.message, named)
    effects.wake(held_back.wpg.backoff.until, timers.group_step(held_back.placement.groups[0]))


def _published(
    step: Step,
    deployment: Deployment,
) -> None:
    """A publish ended a training cycle: wake the sync that waits, and end the burst."""
    state = step.state
    for name in state.job(deployment.job).deployments:
        step.effects.touch_all(state.deployment(name).placement.groups)
    _burst_over(step, deployment)


def _burst_over(step: Step, deployment: Deployment) -> None:
    """The last operation of a cycle has run: if no more work waits, the burst ends."""
    if not deployment.work.queue:
        end_burst(deployment, step.now)
        deployment.demand.burst.forget_pause()
        if not step.settings.policy.repacks or deployment.demand.has_own_trace:
            change_job(step.state.job(deployment.job), JobTrigger.CYCLE_ENDED)
