"""The next step of a node group: who has the lock, what runs, when to switch (PlexRL §4.4, §5.2.2).

A group is looked at after every event that touched it. Its holder's burst goes on while the holder
has something to run; a burst that has paused is waited for a moment, since the next operation of a
cycle usually follows at once; then the member of highest response ratio gets the lock, under a new
fencing token, by an offload of the holder and a load of its own state.
"""

from collections.abc import Sequence

from plexrl.ids import DeploymentId, FencingToken, OperationId
from plexrl.scheduler.context import Context
from plexrl.scheduler.hrrs import Candidate, highest
from plexrl.scheduler.operations import start
from plexrl.scheduler.state import Deployment, Group, Operation, Residency
from plexrl.wire.operations import OperationKind, OperationState

GAP_MARGIN = 2.0
"""The holder's next operation is waited for up to this many times the usual gap in its bursts."""


def advance(context: Context, group: Group, now: float) -> None:
    """Decide everything about `group` that can be decided now."""
    holder = _holder(context, group)
    if holder is None:
        chosen = _choose(context, group, now, among=group.members)
        if chosen is not None:
            _grant(context, group, chosen, now)
        return
    if holder.moving is not None or not holder.is_ready:
        return
    if holder.replaying:
        if not holder.running:
            _replay_next(context, group, holder, now)
        return
    others = [member for member in group.members if member != holder.deployment]
    rival = _choose(context, group, now, among=others)
    if rival is not None and not holder.running and _burst_is_over(context, group, holder, now):
        _switch(context, group, holder, rival, now)
        return
    _dispatch(context, group, holder, now)


def next_operation(context: Context, deployment: Deployment) -> Operation | None:
    """The head of the queue if it could run now, were its WPG on the device."""
    if not deployment.queue:
        return None
    head = context.state.operations[deployment.queue[0]]
    if head.after is not None:
        dependency = context.state.operations.get(head.after)
        if dependency is not None and dependency.state != OperationState.FINISHED:
            return None
    return head


def wants_the_group(context: Context, deployment: Deployment, now: float) -> bool:
    """It has something to run, processes to run it, and no back-off to sit out."""
    return (
        deployment.is_ready
        and now >= deployment.held_back_until
        and next_operation(context, deployment) is not None
    )


def candidate(context: Context, group: Group, deployment: Deployment) -> Candidate:
    """The burst that `deployment` has waiting, as the ordering rule sees it."""
    operations = [context.state.operations[name] for name in deployment.queue]
    queued_s = sum(deployment.estimates.operation_s(op.kind, op.tokens) for op in operations)
    setup_s = 0.0
    if deployment.deployment != group.holder:
        setup_s = deployment.estimates.move_s(OperationKind.LOAD)
        if group.holder is not None:
            resident = context.deployment(group.holder)
            setup_s += resident.estimates.move_s(OperationKind.OFFLOAD)
    return Candidate(
        name=deployment.deployment,
        arrived_at=min((op.submitted_at for op in operations), default=0.0),
        service_s=max(queued_s, deployment.estimates.burst_seconds or 0.0),
        setup_s=setup_s,
    )


def _holder(context: Context, group: Group) -> Deployment | None:
    return None if group.holder is None else context.deployment(group.holder)


def _choose(
    context: Context, group: Group, now: float, among: Sequence[DeploymentId]
) -> Deployment | None:
    members = [context.deployment(name) for name in among]
    waiting = [member for member in members if wants_the_group(context, member, now)]
    best = highest([candidate(context, group, member) for member in waiting], now)
    if best is None:
        return None
    return next(member for member in waiting if member.deployment == best.name)


def _burst_is_over(context: Context, group: Group, holder: Deployment, now: float) -> bool:
    """Whether a member that waits may take the lock from an idle `holder`."""
    started_at = holder.burst_started_at if holder.burst_started_at is not None else now
    if wants_the_group(context, holder, now):
        if now - started_at < context.config.burst_max_s:
            return False
        resident = candidate(context, group, holder)
        members = [context.deployment(name) for name in group.members]
        waiting = [member for member in members if wants_the_group(context, member, now)]
        rivals = [candidate(context, group, member) for member in waiting if member is not holder]
        if highest([resident, *rivals], now) == resident:
            holder.burst_started_at = now
            return False
        return True
    if holder.idle_since is None:
        return True
    gap_s = holder.estimates.gap_seconds
    hold_s = context.config.burst_hold_s
    if gap_s is not None:
        hold_s = min(hold_s, GAP_MARGIN * gap_s)
    if now >= holder.idle_since + hold_s:
        return True
    context.wake(holder.idle_since + hold_s, f"group:{group.group}")
    return False


def _grant(context: Context, group: Group, deployment: Deployment, now: float) -> None:
    """Give the free lock to `deployment` and bring its state onto the GPUs."""
    group.token = FencingToken(group.token + 1)
    group.holder = deployment.deployment
    group.incoming = None
    load(context, group, deployment, now)


def load(context: Context, group: Group, deployment: Deployment, now: float) -> None:
    """Start the load of the holder's last complete version."""
    deployment.residency = Residency.MOVING
    _move(context, group, deployment, OperationKind.LOAD, deployment.durable_seq, now)


def _switch(
    context: Context, group: Group, holder: Deployment, rival: Deployment, now: float
) -> None:
    """Offload the holder; its completion hands the lock to `rival`."""
    end_burst(holder, now)
    group.token = FencingToken(group.token + 1)
    group.incoming = rival.deployment
    holder.residency = Residency.MOVING
    _move(context, group, holder, OperationKind.OFFLOAD, holder.completed_seq, now)


def end_burst(holder: Deployment, now: float) -> None:
    """Close the books on the holder's burst."""
    if holder.burst_started_at is not None:
        ended_at = holder.idle_since if holder.idle_since is not None else now
        holder.estimates.observe_burst(max(0.0, ended_at - holder.burst_started_at))
    holder.burst_started_at = None


def _dispatch(context: Context, group: Group, holder: Deployment, now: float) -> None:
    """Start what the holder's order allows: one operation, or generates side by side."""
    while True:
        head = next_operation(context, holder)
        if head is None or now < holder.held_back_until:
            return
        if holder.running:
            kinds = {command.kind for command in holder.running.values()}
            if kinds != {OperationKind.GENERATE} or head.kind != OperationKind.GENERATE:
                return
        elif (
            len(holder.log) >= context.config.snapshot_operations
            and now >= holder.no_snapshot_until
        ):
            holder.idle_since = None
            _move(context, group, holder, OperationKind.SNAPSHOT, holder.completed_seq, now)
            return
        if holder.burst_started_at is None:
            holder.burst_started_at = now
        elif holder.idle_since is not None:
            holder.estimates.observe_gap(max(0.0, now - holder.idle_since))
        holder.idle_since = None
        holder.queue.pop(0)
        start(context, group, holder, head, now)


def _replay_next(context: Context, group: Group, holder: Deployment, now: float) -> None:
    operation = context.state.operations[holder.replaying[0]]
    start(context, group, holder, operation, now, replay=True)


def _move(
    context: Context,
    group: Group,
    deployment: Deployment,
    kind: OperationKind,
    seq: int,
    now: float,
) -> None:
    """Issue an internal operation that moves the WPG's whole state."""
    name = OperationId(f"{deployment.deployment}:{kind}:{group.token}:{context.state.moves_made}")
    context.state.moves_made += 1
    operation = Operation(
        operation=name,
        deployment=deployment.deployment,
        kind=kind,
        params_json="{}",
        payload=None,
        tokens=0,
        source=None,
        submitted_at=now,
        internal=True,
    )
    context.state.operations[name] = operation
    start(context, group, deployment, operation, now, seq=seq)
    deployment.moving = deployment.running.pop(name)
