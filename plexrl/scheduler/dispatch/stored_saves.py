"""Checkpoints of offloaded deployments, beside the work of the group's holder (PlexRL §4.5.3).

The StateManager has the whole state of an offloaded deployment, and writes its checkpoints from
that: nothing is loaded, and the group's lock stays where it is. The workers only ask for it. Such a
run uses no GPU, so it is billed as none, and is no part of a burst or a profile. A load of the
deployment waits until the version is pinned.
"""

from typing import Final

from plexrl.scheduler.dispatch.candidates.readiness import next_operation
from plexrl.scheduler.operations.operations import Starting
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationKind

_READY: Final = WpgState.READY
_OFFLOADED: Final = Residency.OFFLOADED
_SAVE_CHECKPOINT: Final = OperationKind.SAVE_CHECKPOINT


def start_stored_saves(state: State, effects: Effects, group: Group, now: float) -> None:
    """Start the checkpoints with which the queues of offloaded members begin, one of each."""
    for name in group.members:
        member = state.deployments[name]
        if not member.work.queue or name in (group.holder, group.incoming):
            continue
        # A member of several groups is looked at on the first.
        if member.placement.groups[0] != group.group:
            continue
        head = _stored_save(state, group, member, now)
        if head is not None:
            member.work.take_head()
            Starting(state, effects, now).save_stored(member, head)


def _stored_save(state: State, group: Group, member: Deployment, now: float) -> Operation | None:
    """The head of the queue, if it is a checkpoint that needs no load."""
    head = next_operation(state, member)
    if head is None or head.kind is not _SAVE_CHECKPOINT:
        return None
    wpg, replay = member.wpg, member.work.replay
    if wpg.residency is not _OFFLOADED or wpg.state is not _READY or member.work.running:
        return None
    if wpg.moves.planned is not None or now < wpg.backoff.until:
        return None
    is_whole = not replay.replaying and replay.durable_seq == replay.completed_seq
    # Workers answer a repeated (operation, token) with their first answer: a retry loads the state.
    return head if is_whole and head.token != group.token else None
