"""What a deployment could run now if it had its group: whether there is something, and how much."""

from collections.abc import Sequence
from typing import Final

from plexrl.ids import OperationId
from plexrl.scheduler.dispatch.candidates.group_shares import share_of
from plexrl.scheduler.recovery.relocation import is_stopping
from plexrl.scheduler.rules.hrrs import Candidate
from plexrl.scheduler.rules.switch_cost import switch_cost
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationState

_READY: Final = WpgState.READY
_OFFLOADED: Final = Residency.OFFLOADED
_FINISHED: Final = OperationState.FINISHED

LOOK_AHEAD = 32
"""Number of queued operations that are used to predict the length of a burst or of a queue."""


def next_operation(state: State, deployment: Deployment) -> Operation | None:
    """The head of the queue, if only the load of its WPG is missing to run it."""
    if not deployment.work.queue:
        return None
    head = state.operations[deployment.work.queue[0]]
    return head if head.after is None or _is_over(state, head.after) else None


def _is_over(state: State, name: OperationId) -> bool:
    dependency = state.operations.get(name)
    return dependency is None or dependency.state is _FINISHED


def wants_the_group(state: State, deployment: Deployment, now: float) -> bool:
    """Whether the deployment has an operation to run, ready processes, and no back-off."""
    work, wpg = deployment.work, deployment.wpg
    queue = work.queue
    if not queue or wpg.state is not _READY or now < wpg.backoff.until:
        return False
    if work.running and runs_on_stored_state(deployment):
        return False
    if wpg.moves.planned is not None and is_stopping(state, deployment):
        return False
    after = state.operations[queue[0]].after
    return after is None or _is_over(state, after)


def runs_on_stored_state(deployment: Deployment) -> bool:
    """Whether an operation runs that needs its stored state only (`dispatch.stored_runs`)."""
    return bool(deployment.work.running) and deployment.wpg.residency is _OFFLOADED


def waiting_for(
    state: State, groups: Sequence[Group], besides: Deployment | None, now: float
) -> list[Deployment]:
    """All members of the groups that want them, each once, except `besides`."""
    waiting = []
    for group in groups:
        for name in group.members:
            member = state.deployments[name]
            if member.work.queue and member is not besides and wants_the_group(state, member, now):
                waiting.append(member)
    if len(groups) == 1:
        return waiting
    return list({each.deployment: each for each in waiting}.values())


def queued_s(state: State, deployment: Deployment, count: int) -> float:
    """Estimated seconds of the first `count` queued operations: of `LOOK_AHEAD` of them one by one,
    of the others by the mean of those."""
    estimates, operations = deployment.demand.estimates, state.operations
    found_s, looked = 0.0, min(count, LOOK_AHEAD)
    for name in deployment.work.queue[:looked]:
        operation = operations[name]
        found_s += estimates.operation_s(operation.kind, operation.tokens)
    return found_s * count / looked if count > looked else found_s


def candidate(state: State, deployment: Deployment) -> Candidate:
    """The waiting burst of `deployment`, as input for the ordering; equal on all its groups, so
    that they agree on who goes first."""
    estimates = deployment.demand.estimates
    queue = deployment.work.queue
    head_s = queued_s = burst_s = arrived_at = cycle_s = 0.0
    if queue:
        operations = state.operations
        head = operations[queue[0]]
        # The queue is in order of submission, including operations that a fault put back.
        arrived_at = head.submitted_at
        if deployment.demand.burst.cut_s:
            # What is left of a burst waits since the last part of it, not since its submission.
            arrived_at = max(arrived_at, deployment.demand.burst.wants_since or 0.0)
        head_s = queued_s = estimates.operation_s(head.kind, head.tokens)
        if len(queue) > 1:
            for name in queue[1:LOOK_AHEAD]:
                operation = operations[name]
                queued_s += estimates.operation_s(operation.kind, operation.tokens)
        burst_s = deployment.demand.burst_s(head.tokens)
        ended_at = deployment.demand.burst.ended_at
        if ended_at is not None:
            cycle_s = max(0.0, arrived_at - ended_at) + max(queued_s, burst_s)
    job, names = state.jobs[deployment.job], deployment.placement.groups
    first = state.groups[names[0]]
    setup_s = switch_cost(state, first, deployment)
    share = share_of(first, job.tenant) if first.shares else 0.0
    if len(names) > 1:
        for group in state.groups_of(deployment)[1:]:
            setup_s = max(setup_s, switch_cost(state, group, deployment))
            share = max(share, share_of(group, job.tenant))
    return Candidate(
        name=deployment.deployment,
        serial=deployment.serial,
        arrived_at=arrived_at,
        service_s=max(queued_s, burst_s),
        setup_s=setup_s,
        head_s=head_s,
        cycle_s=cycle_s,
        served_at=deployment.demand.burst.served_at,
        turns_away=_turns_away(first, deployment),
        share=share,
        priority=job.priority,
    )


def _turns_away(group: Group, deployment: Deployment) -> int:
    """Distance from the holder in the fixed order of members; the holder is last."""
    members, holder = group.members, group.holder
    if holder is None or holder == deployment.deployment or holder not in members:
        return len(members)
    return (members.index(deployment.deployment) - members.index(holder)) % len(members)
