"""Runs on the stored state of offloaded deployments, beside the group's holder (PlexRL §4.5.3-4).

The StateManager has the whole state of an offloaded deployment. It writes checkpoints from that,
and with an optimizer in host memory the workers step a copy there on the CPU, which is stored as
the next version. Nothing is loaded, and the group's lock stays where it is. Such a run uses no GPU,
so it is billed as none, and is no part of a burst or a profile. A load of the deployment waits for
its end.
"""

from typing import Final

from plexrl.scheduler.dispatch.candidates.readiness import next_operation
from plexrl.scheduler.operations.latency_breakdown import note_start
from plexrl.scheduler.operations.operations import send_run
from plexrl.scheduler.rules.next_use import usual_pause_s
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.group_lock import fence
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.operation import Operation, change_operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import MUTATING, OperationKind

_READY: Final = WpgState.READY
_OFFLOADED: Final = Residency.OFFLOADED
_OPTIM_STEP: Final = OperationKind.OPTIM_STEP

STEPS_PART = 0.75
"""A deployment ends its bursts with a step if it pauses after this part of its steps."""


def start_stored_runs(step: Step, group: Group) -> None:
    """Start what the queues of offloaded members begin with and their stored state is enough for,
    one of each."""
    for_stored = step.effects.for_stored
    if not for_stored:
        return
    deployments, operations = step.state.deployments, step.state.operations
    for name in group.members:
        if name not in for_stored:
            continue
        member = deployments[name]
        queue = member.work.queue
        if not queue:
            if not member.work.running:
                del for_stored[name]
            continue
        if operations[queue[0]].kind not in member.spec.stored_kinds:
            continue
        if name in (group.holder, group.incoming):
            continue
        # A member of several groups is looked at on the first.
        if member.placement.groups[0] != group.group:
            continue
        head = _stored_run(step.state, group, member, step.now)
        if head is not None:
            member.work.take_head()
            _start(step, member, head)


def leaves_its_step(state: State, holder: Deployment) -> bool:
    """Whether all that an idle holder has left of its burst is an optimizer step that another
    member need not wait for: it runs once the holder is offloaded. A deployment whose weights
    nobody pulls ends its bursts with a step, if it was seen to pause after nearly each of its
    steps."""
    queue = holder.work.queue
    if len(queue) != 1 or not holder.spec.steps_in_host or holder.work.running:
        return False
    head = state.operations[queue[0]]
    if head.kind is not _OPTIM_STEP or head.needs_load or not holder.work.waiting_gradients:
        return False
    if head.ends_burst:
        return True
    part = holder.demand.estimates.pauses_after_steps
    if usual_pause_s(holder) is None or part is None or part < STEPS_PART:
        # What is declared or remembered of a cycle does not tell whether a publish follows a step.
        return False
    return not _publishes(state, holder)


def _publishes(state: State, trainer: Deployment) -> bool:
    """Whether the trainer's weights were published, or a rollout of its job may pull them."""
    names = state.jobs[trainer.job].deployments
    if any(state.deployments[name].spec.kind == "rollout" for name in names):
        return True
    return trainer.wpg.published is not None


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
    if replay.replaying or replay.durable_seq != replay.completed_seq:
        return None
    if head.token == group.token:
        # Workers answer a repeated (operation, token) with their first answer.
        if not _is_quiet(state, group):
            return None
        fence(state, [group])
    return head


def _is_quiet(state: State, group: Group) -> bool:
    """Whether nothing runs under the group's token, so that it can be renewed: between two
    operations of its holder."""
    deployments = [state.deployments[name] for name in (*group.members, *group.fillers)]
    return group.incoming is None and not any(
        each.work.running or each.wpg.moving is not None or each.placement.spans
        for each in deployments
    )


def _start(step: Step, member: Deployment, operation: Operation) -> None:
    now = step.now
    member.demand.meter(now)
    operation.seq = member.work.replay.durable_seq + (operation.kind in MUTATING)
    change_operation(operation, OperationTrigger.STARTED)
    operation.started_at, operation.is_stored = now, True
    note_start(member, operation, now)
    # The estimate was of a wait for the group, which this run does not need: it is no error.
    operation.expected_at = operation.expected_within = None
    # What is behind it waits for it, and for others only from its end on.
    member.demand.burst.stop_wanting()
    send_run(step, member, operation)
