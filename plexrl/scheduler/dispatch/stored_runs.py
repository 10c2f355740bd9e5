"""Runs on the stored state of offloaded deployments, beside the group's holder (PlexRL §4.5.3-4).

The StateManager has the whole state of an offloaded deployment. It writes checkpoints from that,
and with an optimizer in host memory the workers step a copy there on the CPU, which is stored as
the next version. Nothing is loaded, and the group's lock stays where it is. Such a run uses no GPU,
so it is billed as none, and is no part of a burst or a profile. A load of the deployment waits for
its end.
"""

from typing import Final

from plexrl.scheduler.dispatch.candidates.readiness import next_operation
from plexrl.scheduler.operations.deadlines.bounds import watch
from plexrl.scheduler.operations.latency_breakdown import note_start
from plexrl.scheduler.rules.next_use import next_use_s
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages.runs import make_run, make_stored_step
from plexrl.scheduler.state.operation import Operation, change_operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.messages import AnyRun
from plexrl.wire.operations import OperationKind

_READY: Final = WpgState.READY
_OFFLOADED: Final = Residency.OFFLOADED
_SAVE_CHECKPOINT: Final = OperationKind.SAVE_CHECKPOINT
_OPTIM_STEP: Final = OperationKind.OPTIM_STEP


def start_stored_runs(step: Step, group: Group) -> None:
    """Start what the queues of offloaded members begin with and their stored state is enough for,
    one of each."""
    deployments, operations = step.state.deployments, step.state.operations
    for name in group.members:
        member = deployments[name]
        queue = member.work.queue
        if not queue or not _needs_no_device(member, operations[queue[0]]):
            continue
        if name in (group.holder, group.incoming):
            continue
        # A member of several groups is looked at on the first.
        if member.placement.groups[0] != group.group:
            continue
        head = _stored_run(step.state, group, member, step.now)
        if head is not None:
            member.work.take_head()
            _start(step, group, member, head)


def leaves_its_step(state: State, holder: Deployment) -> bool:
    """Whether all that an idle holder has left of its burst is an optimizer step that another
    member need not wait for: it runs once the holder is offloaded."""
    queue = holder.work.queue
    if len(queue) != 1 or not holder.spec.steps_in_host or holder.work.running:
        return False
    head = state.operations[queue[0]]
    is_last = head.kind is _OPTIM_STEP and head.ends_burst and not head.needs_load
    return is_last and bool(holder.work.waiting_gradients)


def _needs_no_device(member: Deployment, head: Operation) -> bool:
    if head.kind is _OPTIM_STEP:
        return member.spec.steps_in_host
    return head.kind is _SAVE_CHECKPOINT


def _stored_run(state: State, group: Group, member: Deployment, now: float) -> Operation | None:
    """The head of the queue, if it needs no load."""
    head = next_operation(state, member)
    if head is None or head.needs_load:
        return None
    wpg, replay = member.wpg, member.work.replay
    if wpg.residency is not _OFFLOADED or wpg.state is not _READY or member.work.running:
        return None
    if wpg.moves.planned is not None or now < wpg.backoff.until:
        return None
    is_whole = not replay.replaying and replay.durable_seq == replay.completed_seq
    # Workers answer a repeated (operation, token) with their first answer.
    return head if is_whole and head.token != group.token else None


def _start(step: Step, group: Group, member: Deployment, operation: Operation) -> None:
    state, now = step.state, step.now
    member.demand.meter(now)
    change_operation(operation, OperationTrigger.STARTED)
    operation.started_at = now
    note_start(member, operation, now)
    # The estimate was of a wait for the group, which this run does not need: it is no error.
    operation.expected_at = operation.expected_within = None
    operation.token, operation.group = group.token, group.group
    if not member.work.queue:
        member.demand.burst.stop_wanting()
    command = _run(group, member, operation, now)
    member.work.begin_run(command)
    if not member.work.watch_at and state.overdue_s:
        watch(step, member)
    if state.routers:
        step.effects.commands.append(command)


def _run(group: Group, member: Deployment, operation: Operation, now: float) -> AnyRun:
    durable_seq = member.work.replay.durable_seq
    if operation.kind is _OPTIM_STEP:
        operation.seq = durable_seq + 1
        return make_stored_step(group, member, operation, next_use_s(member, now))
    operation.seq = durable_seq
    return make_run(group, member, operation, (), replay=False)
