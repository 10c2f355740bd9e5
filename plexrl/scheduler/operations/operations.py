"""Life of an operation in the core: queue, run, history."""

from collections.abc import Iterable
from typing import Final

from plexrl.errors import OperationCancelledError, OverloadedError, PlexRLError
from plexrl.ids import OperationId
from plexrl.scheduler.accounting.profiler import (
    next_began,
    run_began,
    run_ended,
    stored_run_ended,
    waits,
)
from plexrl.scheduler.accounting.retention import forget_oldest
from plexrl.scheduler.accounting.sharing import note_wait
from plexrl.scheduler.accounting.usage import bill, count_failure, meter
from plexrl.scheduler.operations.deadlines.bounds import watch
from plexrl.scheduler.operations.failures import earlier_failure, failure_of, read_error
from plexrl.scheduler.operations.gradients import gradients_after
from plexrl.scheduler.operations.latency_breakdown import compare_start, note_start
from plexrl.scheduler.operations.published_versions import (
    find_sources,
    has_published,
    note_published,
    wait_from_publish,
)
from plexrl.scheduler.operations.replay import drop_log, drop_past
from plexrl.scheduler.operations.submission.backpressure import ended, taken_in
from plexrl.scheduler.operations.submission.queue_order import position_in_queue
from plexrl.scheduler.rules.next_use import next_use_s
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.messages.events import OperationFinished, OperationSubmitted
from plexrl.scheduler.state.messages.runs import make_move, make_run
from plexrl.scheduler.state.operation import Operation, change_operation, error_view
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.messages import AbortOperation, Run
from plexrl.wire.operations import HALTED, MUTATING, SUPERSEDING, OperationKind, OperationState

SAVING_S = 0.2
"""When who waits for a scheduled checkpoint asks again."""

OWN_MARK = "#"
"""Only ids of the scheduler's own operations contain it."""

MOVES = frozenset({OperationKind.LOAD, OperationKind.OFFLOAD, OperationKind.SNAPSHOT})
"""The scheduler's own operations that move state; they do not count as a job's demand."""

_PUBLISH: Final = OperationKind.PUBLISH
_OFFLOAD: Final = OperationKind.OFFLOAD
_GENERATE: Final = OperationKind.GENERATE
_OPTIM_STEP: Final = OperationKind.OPTIM_STEP
_SAVE_CHECKPOINT: Final = OperationKind.SAVE_CHECKPOINT
_OFFLOADED: Final = Residency.OFFLOADED
_STARTED: Final = OperationTrigger.STARTED
_FINISHED: Final = OperationTrigger.FINISHED
_FAILS: Final = OperationTrigger.FAILED
_CANCELLED: Final = OperationTrigger.CANCELLED
_FAILED: Final = OperationState.FAILED
_MISSED: Final = MUTATING | {_SAVE_CHECKPOINT}
"""Kinds whose failure the controller must acknowledge."""

_OPENINGS: dict[OperationKind, str] = {kind: f"{OWN_MARK}{kind}." for kind in MOVES}
"""Middle part of a move's id, by kind: between the deployment's id and a number."""


def enqueue(step: Step, event: OperationSubmitted, deployment: Deployment) -> Operation:
    """Queue a checked submission; for a sync, also the publish that it depends on."""
    state, now = step.state, step.now
    after = None if event.source is None else _publish_before(step, event)
    operation = Operation(event.operation, event.deployment, event.kind, now, internal=False)
    operation.params, operation.payload = event.params, event.payload
    operation.tokens, operation.source = event.tokens, event.source
    if event.deadline_s is not None:
        operation.deadline_at = now + event.deadline_s
    operation.payload_bytes, operation.payload_digest = event.payload_bytes, event.payload_digest
    operation.in_flight, operation.published = event.in_flight, event.published
    operation.after, operation.ends_burst = after, event.ends_burst
    state.operations[event.operation] = operation
    taken_in(state, deployment, operation)
    _queue(step, deployment, event.operation)
    return operation


def _publish_before(step: Step, event: OperationSubmitted) -> OperationId | None:
    """The publish that a sync waits for; None if it needs none."""
    state = step.state
    assert event.source is not None, f"{event.operation} pulls from nobody"
    if event.published and has_published(state, event.source):
        return None
    name = publish_name(state, event.operation)
    enqueue_publish(step, state.deployment(event.source), name, event.operation)
    return name


def publish_name(state: State, sync: OperationId, attempt: str = "") -> OperationId:
    """An unused id for the publish that a sync needs: an earlier sync with the same id may have
    left the history before its publish."""
    name = OperationId(f"{sync}{OWN_MARK}publish{attempt}")
    while name in state.operations:
        name = OperationId(f"{name}'")
    return name


def enqueue_publish(
    step: Step,
    source: Deployment,
    name: OperationId,
    serves: OperationId,
    *,
    at_once: bool = False,
) -> None:
    """Queue a publish of a trainer's weights for the sync `serves`; with `at_once` before all that
    the trainer has to do."""
    state, now = step.state, step.now
    since, place = now, None
    if at_once and source.work.queue:
        # The queue is in the order of submission.
        since, place = min(now, state.operations[source.work.queue[0]].submitted_at), 0
    operation = Operation(name, source.deployment, _PUBLISH, since, internal=True)
    operation.serves = serves
    state.operations[name] = operation
    _queue(step, source, name, place=place)


def enqueue_zero_grad(step: Step, deployment: Deployment) -> None:
    """Queue an operation that drops the gradients of a trainer's accepted operations."""
    state, now = step.state, step.now
    name = OperationId(f"{deployment.deployment}{OWN_MARK}zero_grad.{state.moves_made}")
    state.moves_made += 1
    operation = Operation(name, deployment.deployment, OperationKind.ZERO_GRAD, now, internal=True)
    state.operations[name] = operation
    _queue(step, deployment, name)


def check_saved(state: State, deployments: Iterable[Deployment]) -> None:
    """Raises `OverloadedError` while a scheduled checkpoint of one of them is not pinned: only the
    cluster knows of it, so nobody else waits for it."""
    for deployment in deployments:
        for name in (*deployment.work.running, *deployment.work.queue):
            operation = state.operations[name]
            if operation.internal and operation.kind is _SAVE_CHECKPOINT:
                raise OverloadedError(
                    f"the scheduled checkpoint of {deployment.deployment!r} is not pinned yet: try "
                    "again, or end the job as cancelled",
                    retry_after_s=SAVING_S,
                )


def _save_if_due(step: Step, deployment: Deployment, done: Operation) -> None:
    """After the optimizer step `done`: queue the scheduled checkpoint of exactly its weights,
    before all that was submitted after it."""
    state, trainer_step = step.state, deployment.work.trainer_step
    schedule = deployment.spec.checkpoints
    if schedule is None or not schedule.is_due(trainer_step):
        return
    name = OperationId(f"{deployment.deployment}{OWN_MARK}checkpoint.{state.moves_made}")
    state.moves_made += 1
    # The queue is in the order of submission.
    since = done.submitted_at
    operation = Operation(name, deployment.deployment, _SAVE_CHECKPOINT, since, internal=True)
    operation.params = schedule.params(deployment.deployment.rpartition("/")[2], trainer_step)
    state.operations[name] = operation
    _queue(step, deployment, name, place=0)


def _queue(
    step: Step,
    deployment: Deployment,
    operation: OperationId,
    place: int | None = None,
) -> None:
    work, burst = deployment.work, deployment.demand.burst
    # While something of its own runs, it waits for that, also without the group.
    if not work.running and (burst.wants_since is None or not work.queue):
        burst.want(step.now)
    work.enqueue(len(work.queue) if place is None else place, operation)
    if step.state.operations[operation].kind in deployment.spec.stored_kinds:
        step.effects.for_stored[deployment.deployment] = None
    if work.queue[0] == operation:
        # Only the head of a queue affects the order of members.
        step.effects.touch_all(deployment.placement.groups)


def start_run(
    step: Step, deployment: Deployment, operation: Operation, *, replay: bool = False
) -> None:
    """Send `operation`, which is no move, to its WPG under the token of its groups."""
    state, now = step.state, step.now
    group = state.groups[deployment.placement.groups[0]]
    work = deployment.work
    if work.running or deployment.wpg.moving is not None:
        meter(state, deployment, now)
    else:
        deployment.demand.meter(now)
    if replay:
        work.replay.send(now)
    else:
        _note_start(step, deployment, operation, group)
    sources = find_sources(state, operation, deployment, replay=replay)
    send_run(step, deployment, operation, sources, replay=replay)


def send_run(
    step: Step,
    deployment: Deployment,
    operation: Operation,
    sources: tuple[str, ...] = (),
    *,
    replay: bool = False,
) -> None:
    """Send a started operation to its workers, and watch its bound. `sources`: of a sync."""
    state, work = step.state, deployment.work
    group = state.groups[deployment.placement.groups[0]]
    operation.token = group.token
    operation.group, operation.also_on = group.group, deployment.placement.groups[1:]
    command = make_run(group, deployment, operation, sources, replay=replay)
    operation.is_interrupted = False
    work.begin_run(command)
    if not work.watch_at and state.overdue_s:
        watch(step, deployment)
    if state.routers:
        if operation.stopped_rows:
            abort(step.effects, command, operation.stopped_rows)
        step.effects.commands.append(command)


def _note_start(step: Step, deployment: Deployment, operation: Operation, group: Group) -> None:
    """The first run of the operation starts: number and measure it."""
    state, now = step.state, step.now
    seq, kind = deployment.work.replay.completed_seq, operation.kind
    operation.seq = seq + 1 if kind in MUTATING else seq
    change_operation(operation, _STARTED)
    operation.started_at = now
    note_start(deployment, operation, now)
    if deployment.is_profiled:
        if operation.after is not None:
            wait_from_publish(state, deployment, operation.after)
        if next_began(deployment, kind, now):
            step.effects.cycles_over[deployment.deployment] = None
        overlapped = False
        if waits(deployment, now):
            note_wait(state, deployment, now)
            overlapped = _rollouts_generate(state, deployment)
        run_began(deployment, now, overlapped=overlapped)
    if operation.expected_at is not None:
        compare_start(state, group, operation, now)


def start_move(
    step: Step,
    deployment: Deployment,
    kind: OperationKind,
    seq: int,
    cause: Deployment | None = None,
) -> None:
    """Send the WPG a move of its whole state; no other operation runs at the same time.
    `cause`: another deployment whose job is billed for it."""
    state, now = step.state, step.now
    group = state.groups[deployment.placement.groups[0]]
    token = group.token
    number = f"{token}.{state.moves_made}"
    name = OperationId(deployment.deployment + _OPENINGS[kind] + number)
    state.moves_made += 1
    operation = Operation(name, deployment.deployment, kind, now, internal=True)
    change_operation(operation, _STARTED)
    operation.seq = seq
    operation.token = token
    operation.group, operation.also_on = group.group, deployment.placement.groups[1:]
    operation.started_at = now
    # The scheduler made it, so no caller waited.
    operation.queue_s = 0.0
    due_s: float | None = None
    incoming: Deployment | None = None
    if kind is _OFFLOAD:
        due_s = next_use_s(deployment, now)
        successor = None if group.incoming is None else state.deployments[group.incoming]
        # Only on the same GPUs a load can follow the offload part by part.
        has_same_gpus = (
            successor is not None and successor.placement.groups == deployment.placement.groups
        )
        if successor is not None and has_same_gpus and successor.work.replay.durable_seq:
            incoming = successor
    if cause is not None:
        operation.caused_by = cause.deployment
        operation.paid_by = state.jobs[cause.job].tenant
    state.operations[name] = operation
    deployment.demand.meter(now)
    command = make_move(group, deployment, operation, due_s, incoming)
    deployment.wpg.begin_move(command)
    if not deployment.work.watch_at and state.overdue_s:
        watch(step, deployment)
    if state.routers:
        step.effects.commands.append(command)


def abort(effects: Effects, command: Run, rows: tuple[int, ...] | None = None) -> None:
    """Have the workers stop a run, or some of its rows; what it drew so far is its result. Sent
    before the run, the rows draw nothing."""
    effects.emit(
        AbortOperation(
            operation=command.operation,
            deployment=command.deployment,
            addresses=command.addresses,
            incarnation=command.incarnation,
            rows=rows,
        )
    )


def interrupt(effects: Effects, command: Run) -> None:
    """Have the workers stop this run of a generation; another one continues it."""
    effects.emit(
        AbortOperation(
            operation=command.operation,
            deployment=command.deployment,
            addresses=command.addresses,
            incarnation=command.incarnation,
            token=command.token,
        )
    )


def complete_operation(
    step: Step, deployment: Deployment, operation: Operation, event: OperationFinished
) -> None:
    """Record a completed user operation or publish, and keep what a recovery needs. A
    mutation that dropped the gradients completes, but its state is FAILED."""
    if deployment.is_profiled:
        _note_run(step, deployment, operation)
    operation.result = event.result
    operation.result_bytes = event.result_bytes
    kind, work = operation.kind, deployment.work
    if kind in MUTATING:
        waiting = gradients_after(kind, work.waiting_gradients)
        work.count_gradients(waiting if event.error is None else 0)
        if kind in SUPERSEDING:
            drop_log(step, deployment)
            drop_past(step, deployment)
            work.replay.supersede()
        work.replay.append(operation.operation, operation.seq)
        operation.is_logged = True
    elif operation.payload is not None:
        step.effects.discards.append(operation.payload)
    if kind == _PUBLISH:
        if not operation.internal:
            note_published(step, deployment, operation)
        dependent = _served(step.state, operation)
        if dependent is not None:
            dependent.source_seq = operation.seq
            dependent.source_step = deployment.work.trainer_step
    finish_operation(step, deployment, operation, event)
    if kind is _OPTIM_STEP and event.error is None:
        _save_if_due(step, deployment, operation)
    if operation.state is _FAILED:
        assert event.error is not None
        _halt(step, deployment, operation, read_error(event.error))


def fail_operation(step: Step, operation: Operation, error: PlexRLError, *, place: int = 0) -> None:
    """Record a failure; operations that depend on this one fail too.

    `place` was its index in its deployment's queue; 0 if it was not queued.
    """
    is_cancelled = isinstance(error, OperationCancelledError)
    change_operation(operation, _CANCELLED if is_cancelled else _FAILS)
    operation.error = error_view(error)
    step.effects.discard(operation.payload)
    own = step.state.deployment(operation.deployment)
    _into_history(step, own, operation)
    if not own.work.queue and not own.work.running and not own.work.replay.replaying:
        own.wpg.backoff.clear()
    if operation.state is _FAILED and operation.kind in _MISSED:
        _halt(step, own, operation, error, place)
    dependent = _served(step.state, operation)
    if dependent is None:
        return
    # A final dependent is a sync that is replayed: it is retried without this publish.
    step.effects.touch_all(step.state.deployment(dependent.deployment).placement.groups)
    if dependent.state == OperationState.PENDING:
        fail_queued(step, dependent, error)


def fail_queued(step: Step, operation: Operation, error: PlexRLError) -> None:
    """Fail an operation that is in its queue."""
    deployment = step.state.deployment(operation.deployment)
    place = position_in_queue(step.state, deployment, operation)
    deployment.work.remove(place)
    fail_operation(step, operation, error, place=place)
    step.effects.touch_all(deployment.placement.groups)


def finish_operation(
    step: Step, deployment: Deployment, operation: Operation, event: OperationFinished
) -> None:
    """Record the end of an operation, and its measurements."""
    if event.error is not None:
        change_operation(operation, _FAILS)
        operation.error = error_view(read_error(event.error))
    else:
        change_operation(operation, _FINISHED)
        operation.error = None
    operation.result_json = event.result_json
    operation.compute_s = event.compute_s
    operation.transfer_s = event.transfer_s
    _into_history(step, deployment, operation)


def _note_run(step: Step, deployment: Deployment, operation: Operation) -> None:
    if deployment.wpg.residency is _OFFLOADED:
        stored_run_ended(deployment, operation.kind)
    else:
        began_at = operation.started_at if operation.started_at is not None else step.now
        overlapped = _rollouts_generate(step.state, deployment)
        run_ended(deployment, operation.kind, began_at, step.now, overlapped=overlapped)
    if deployment.work.queue:
        deployment.demand.burst.want(step.now)


def _halt(
    step: Step, deployment: Deployment, operation: Operation, error: PlexRLError, place: int = 0
) -> None:
    """Fail the queued operations that depend on a failed one, until the controller acknowledges
    the failure. Operations before `place` in the queue were submitted earlier, and do not
    depend on it."""
    if not step.state.job(deployment.job).halts_on_failure:
        return
    failure = failure_of(operation, error, step.now)
    if any(each.operation == failure.operation for each in deployment.work.unacknowledged):
        # This operation failed because of a failure that is recorded.
        return
    deployment.work.fail(failure)
    if not failure.halts:
        return
    for name in deployment.work.queue[place:]:
        if _is_halted(step.state, name):
            fail_queued(step, step.state.operations[name], earlier_failure(failure))
    step.effects.touch_all(deployment.placement.groups)


def _into_history(step: Step, deployment: Deployment, operation: Operation) -> None:
    state, effects = step.state, step.effects
    operation.finished_at = step.now
    if operation.partial is not None:
        effects.discards.append(operation.partial)
        operation.partial = None
    if operation.is_counted:
        ended(state, deployment, operation, step.now)
    if operation.source is not None:
        # A move of the trainer may wait for it.
        effects.touch_all(state.deployment(operation.source).placement.groups)
    if operation.started_at is not None or operation.interruptions:
        bill(state, deployment, operation)
    elif operation.state is _FAILED:
        count_failure(state, deployment, operation)
    index = state.finished_count + 1
    state.finished_count = operation.index = index
    state.finished[index] = operation.operation
    if len(state.finished) > state.history:
        forget_oldest(step)


def _rollouts_generate(state: State, deployment: Deployment) -> bool:
    """Whether a rollout of the deployment's job generates, and the deployment is none itself."""
    names = state.jobs[deployment.job].deployments
    if len(names) == 1 or deployment.spec.kind == "rollout":
        return False
    deployments = state.deployments
    for name in names:
        other = deployments[name]
        if other.spec.kind == "rollout" and not other.spec.preemptible:
            for run in other.work.running.values():
                if run.kind is _GENERATE:
                    return True
    return False


def _is_halted(state: State, name: OperationId) -> bool:
    """Whether a queued operation depends on its deployment's state. A publish for a sync that is
    replayed does not: it publishes a state from before the failure."""
    operation = state.operations[name]
    if operation.internal and operation.kind == _PUBLISH:
        dependent = _served(state, operation)
        return dependent is not None and dependent.state == OperationState.PENDING
    return operation.kind in HALTED and not operation.internal


def _served(state: State, operation: Operation) -> Operation | None:
    """The operation that waits for this publish, if it is in the history."""
    if operation.serves is None:
        return None
    served = state.operations.get(operation.serves)
    if served is None or served.after != operation.operation:
        # Another sync may have the same id, and wait for another publish.
        return None
    return served
