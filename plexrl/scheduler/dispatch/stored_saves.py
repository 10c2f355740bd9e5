"""Checkpoints of offloaded deployments, beside the work of the group's holder (PlexRL §4.5.3).

The StateManager has the whole state of an offloaded deployment, and writes its checkpoints from
that: nothing is loaded, and the group's lock stays where it is. The workers only ask for it. Such a
run uses no GPU, so it is billed as none, and is no part of a burst or a profile. A load of the
deployment waits until the version is pinned.
"""

from typing import Final

from plexrl.scheduler.dispatch.candidates.readiness import next_operation
from plexrl.scheduler.operations.latency_breakdown import note_start
from plexrl.scheduler.operations.operations import send_run
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.operation import Operation, change_operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationKind

_READY: Final = WpgState.READY
_OFFLOADED: Final = Residency.OFFLOADED
_SAVE_CHECKPOINT: Final = OperationKind.SAVE_CHECKPOINT


def start_stored_saves(step: Step, group: Group) -> None:
    """Start the checkpoints with which the queues of offloaded members begin, one of each."""
    saving = step.effects.saving
    if not saving:
        return
    deployments, operations = step.state.deployments, step.state.operations
    for name in group.members:
        if name not in saving:
            continue
        member = deployments[name]
        queue = member.work.queue
        if not queue:
            if not member.work.running:
                del saving[name]
            continue
        if operations[queue[0]].kind is not _SAVE_CHECKPOINT:
            continue
        if name in (group.holder, group.incoming):
            continue
        # A member of several groups is looked at on the first.
        if member.placement.groups[0] != group.group:
            continue
        head = _stored_save(step.state, group, member, step.now)
        if head is not None:
            member.work.take_head()
            _start(step, member, head)


def _stored_save(state: State, group: Group, member: Deployment, now: float) -> Operation | None:
    """The checkpoint with which the queue begins, if it needs no load."""
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


def _start(step: Step, member: Deployment, operation: Operation) -> None:
    now = step.now
    member.demand.meter(now)
    operation.seq = member.work.replay.durable_seq
    change_operation(operation, OperationTrigger.STARTED)
    operation.started_at = now
    note_start(member, operation, now)
    # The estimate was of a wait for the group, which this run does not need: it is no error.
    operation.expected_at = operation.expected_within = None
    if not member.work.queue:
        member.demand.burst.stop_wanting()
    send_run(step, member, operation)
