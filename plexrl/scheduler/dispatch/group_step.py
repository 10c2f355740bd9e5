"""Next step of a node group: lock holder, dispatch, context switch (PlexRL §4.4, §5.2.2).

A group's step follows each event that touches the group. The holder's burst continues while the
holder has operations. After the last one the holder keeps the lock for a moment, because the next
operation of a cycle usually follows at once. Then the member with the highest response ratio gets
the lock: the holder is offloaded, and the member's state is loaded under a new fencing token.
"""

from collections.abc import Sequence
from typing import Final

from plexrl.ids import DeploymentId
from plexrl.scheduler.dispatch.candidates.group_shares import settle_shares
from plexrl.scheduler.dispatch.candidates.readiness import (
    candidate,
    next_operation,
    wants_the_group,
)
from plexrl.scheduler.dispatch.idle_time import (
    expected_next,
    may_fill,
    must_leave,
)
from plexrl.scheduler.dispatch.slack_guard import holds_back, prefetch
from plexrl.scheduler.jobs.context import Context
from plexrl.scheduler.jobs.lifecycle import launch
from plexrl.scheduler.operations.deadlines.cancellation import interrupt_all
from plexrl.scheduler.operations.held.holding import renew_token
from plexrl.scheduler.operations.operations import start, start_move
from plexrl.scheduler.operations.replay import has_much_to_replay, leans_on_its_source
from plexrl.scheduler.placement.capacity.overlaps import has_exclusive_slots
from plexrl.scheduler.recovery.evacuation import displace, leaving_fillers
from plexrl.scheduler.recovery.rebuilding import may_replay
from plexrl.scheduler.recovery.relocation import finish as finish_relocation
from plexrl.scheduler.recovery.relocation import is_due, is_stopping
from plexrl.scheduler.rules.ordering import first
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.rules.switch_cost import round_trip_s
from plexrl.scheduler.state import group_lock
from plexrl.scheduler.state.deployment import wpg
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.messages.commands import PrefetchState
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationKind

_READY: Final = WpgState.READY
_LOAD: Final = OperationKind.LOAD
_OFFLOAD: Final = OperationKind.OFFLOAD
_GENERATE: Final = OperationKind.GENERATE

GAP_MARGIN = 4.0
"""Maximum wait for the holder's next operation, as a multiple of the usual gap in its bursts."""


def advance(context: Context, group: Group, now: float) -> None:
    """Decide and start the next step of `group`."""
    state, settings, effects = context.state, context.settings, context.effects
    if context.cluster.relocating and _move_out(context, group, now):
        return
    if not group.members:
        for left in leaving_fillers(state, settings, effects, group):
            displace(context, left, "the members of its group have left", now)
        return
    if group.holder is None:
        waiting = _waiting(state, group, now)
        settle_shares(state, settings, group, waiting, now)
        chosen = _first_not_held_back(state, settings, effects, group, waiting, now)
        if chosen is None and not waiting:
            chosen = _filler(state, effects, group, now)
        if chosen is not None:
            _grant(state, effects, group, chosen, now)
        return
    holder = state.deployments[group.holder]
    if holder.moving is not None or holder.state is not _READY:
        return
    if holder.replay.replaying:
        held = now < holder.backoff.until
        if not holder.running and not held and may_replay(state, holder):
            _replay_next(state, effects, group, holder, now)
        return
    if holder.moves.planned is not None and is_stopping(state, holder):
        return
    if holder.preemptible and _gives_way(state, settings, effects, group, holder, now):
        return
    if holder.kind == "forward" and leans_on_its_source(holder, now):
        _snapshot(state, effects, group, holder, now)
        return
    if not holder.running and not _goes_on(state, settings, holder, now):
        waiting = _waiting(state, group, now, besides=holder)
        if waiting and _may_be_relieved(state, settings, effects, group, holder, waiting, now):
            chosen = _first_not_held_back(state, settings, effects, group, waiting, now)
            if chosen is not None:
                _switch(state, effects, group, holder, chosen, now)
                return
            if not holder.queue:
                # All waiting members are held back from a critical segment; the holder is idle.
                end_burst(holder, now)
                _anticipate(state, settings, effects, group, holder, now, held_back=True)
                return
        if not waiting and not wants_the_group(state, holder, now):
            filler = _filler(state, effects, group, now)
            if filler is not None and _may_be_relieved(
                state, settings, effects, group, holder, [filler], now
            ):
                _switch(state, effects, group, holder, filler, now)
                return
        if not waiting and not holder.queue:
            _anticipate(state, settings, effects, group, holder, now)
            return
    if holder.queue:
        guards = settings.policy.guards_slack
        if guards and _keeps_out(state, settings, effects, group, holder, now):
            return
        _dispatch(state, settings, effects, group, holder, now)
    if holder.running and context.cluster.inventory.spills(group):
        hint = _look_ahead(state, settings, group, holder, now)
        if hint is not None:
            effects.emit(hint)


def _filler(state: State, effects: Effects, group: Group, now: float) -> Deployment | None:
    """A filler with work for which there is time, while no member wants the group."""
    for name in group.fillers:
        filler = state.deployments[name]
        if wants_the_group(state, filler, now) and may_fill(state, effects, group, filler, now):
            return filler
    return None


def _gives_way(
    state: State, settings: Settings, effects: Effects, group: Group, filler: Deployment, now: float
) -> bool:
    """Whether the filler that holds the group starts nothing more. If so, it is interrupted, or the
    group is switched."""
    waiting = _waiting(state, group, now)
    has_work = filler.running or wants_the_group(state, filler, now)
    if not waiting and has_work and not must_leave(state, effects, group, filler, now):
        return False
    if filler.running:
        interrupt_all(effects, state, filler)
        return True
    end_burst(filler, now)
    settle_shares(state, settings, group, waiting, now)
    chosen = _first_not_held_back(state, settings, effects, group, waiting, now)
    if chosen is None and settings.anticipates:
        chosen = expected_next(state, group, now, critical=bool(waiting))
    if chosen is not None:
        _switch(state, effects, group, filler, chosen, now)
    return True


def _waiting(
    state: State, group: Group, now: float, besides: Deployment | None = None
) -> list[Deployment]:
    """All members that want the group, except `besides`."""
    deployments = state.deployments
    found = []
    for name in group.members:
        member = deployments[name]
        if member.queue and member is not besides and wants_the_group(state, member, now):
            found.append(member)
    return found


def _first(
    state: State, settings: Settings, group: Group, waiting: Sequence[Deployment], now: float
) -> Deployment:
    """The first of `waiting`, which is not empty, by the ordering."""
    if len(waiting) == 1:
        return waiting[0]
    candidates = [candidate(state, group, each) for each in waiting]
    best = first(settings.ordering, candidates, now, settings.config.starvation_bound_s)
    assert best is not None, f"{group.group}: no candidate is first"
    return state.deployment(DeploymentId(best.name))


def _first_not_held_back(
    state: State,
    settings: Settings,
    effects: Effects,
    group: Group,
    waiting: Sequence[Deployment],
    now: float,
) -> Deployment | None:
    """The first of `waiting` that is not held back from a critical segment."""
    if not settings.policy.guards_slack:
        return _first(state, settings, group, waiting, now) if waiting else None
    left = list(waiting)
    while left:
        chosen = _first(state, settings, group, left, now)
        if not _held_back(state, settings, effects, group, chosen, now):
            return chosen
        left.remove(chosen)
    return None


def _held_back(
    state: State, settings: Settings, effects: Effects, group: Group, chosen: Deployment, now: float
) -> bool:
    """Whether the next burst must stay out of a critical segment; if so, sets a timer."""
    if has_exclusive_slots(chosen):
        return False
    wait_s = holds_back(state, settings, group, chosen, candidate(state, group, chosen), now)
    if wait_s is None:
        return False
    effects.wake(now + wait_s, timers.group_step(group.group))
    return True


def _keeps_out(
    state: State, settings: Settings, effects: Effects, group: Group, holder: Deployment, now: float
) -> bool:
    """Whether a resident guest must not begin its next burst: the group goes to who is expected."""
    if holder.running or holder.preemptible or not wants_the_group(state, holder, now):
        return False
    started_at, idle_since = holder.burst.started_at, holder.burst.idle_since
    pause_s = 0.0 if idle_since is None else now - idle_since
    if started_at is not None and not _is_after_burst(state, settings, holder, pause_s):
        return False
    if not _held_back(state, settings, effects, group, holder, now):
        return False
    end_burst(holder, now)
    _anticipate(state, settings, effects, group, holder, now, held_back=True)
    return True


def _move_out(context: Context, group: Group, now: float) -> bool:
    """Continue the moves of members that are between operations. True if the group must wait."""
    state = context.state
    for name in list(group.members):
        member = state.deployment(name)
        if not is_due(state, member):
            continue
        if member.residency == Residency.DEVICE and group.holder == name:
            _offload(state, context.effects, group, member, now)
            return True
        if member.residency != Residency.DEVICE and finish_relocation(context, member, now):
            if member.state == WpgState.RECOVERING:
                launch(state, context.effects, member, now)
            context.effects.touch(member.group)
    return group.group not in state.groups


def _goes_on(state: State, settings: Settings, holder: Deployment, now: float) -> bool:
    """Whether the holder's burst continues, even if others wait."""
    if not holder.queue or not settings.ordering.holds_bursts:
        return False
    if not wants_the_group(state, holder, now):
        return False
    started_at = holder.burst.started_at if holder.burst.started_at is not None else now
    return now - started_at < settings.config.burst_max_s


def _ends_its_generations(
    state: State, settings: Settings, group: Group, holder: Deployment, now: float
) -> bool:
    """Whether a rollout's burst has reached its bound and others wait: the generations that run go
    on to their end, and no other one begins."""
    if len(group.members) == 1 or _goes_on(state, settings, holder, now):
        return False
    return bool(_waiting(state, group, now, besides=holder))


def _may_be_relieved(
    state: State,
    settings: Settings,
    effects: Effects,
    group: Group,
    holder: Deployment,
    waiting: Sequence[Deployment],
    now: float,
) -> bool:
    """Whether one of `waiting` may take the lock now. It may restart the burst or set a timer."""
    ordering = settings.ordering
    if wants_the_group(state, holder, now):
        settle_shares(state, settings, group, [holder, *waiting], now)
        if _first(state, settings, group, [holder, *waiting], now) is not holder:
            return True
        if ordering.holds_bursts:
            holder.burst.begin(now)
        return False
    if holder.burst.idle_since is not None and ordering.holds_bursts:
        hold_s = _hold_s(state, settings, holder)
        if now < holder.burst.idle_since + hold_s:
            effects.wake(holder.burst.idle_since + hold_s, timers.group_step(group.group))
            return False
    settle_shares(state, settings, group, waiting, now)
    return True


def _hold_s(state: State, settings: Settings, holder: Deployment) -> float:
    """Maximum wait for the next operation of a burst: at most the time of a switch away and
    back."""
    usual_s = GAP_MARGIN * (holder.estimates.gap_seconds or 0.0)
    return min(max(settings.config.burst_hold_s, usual_s), round_trip_s(state, holder))


def _anticipate(
    state: State,
    settings: Settings,
    effects: Effects,
    group: Group,
    holder: Deployment,
    now: float,
    *,
    held_back: bool = False,
) -> None:
    """Switch an idle group to the member whose next burst is expected first.

    It needs an ended burst of the holder. A wrong prediction costs little: another member needs a
    switch in any case, and one that arrives during the offload gets the group. With `held_back`,
    waiting members are held back for one with exclusive slots, and only such a member is chosen.
    """
    burst = holder.burst
    if not settings.anticipates or burst.started_at is not None or burst.ended_at is None:
        return
    expected = expected_next(state, group, now, critical=held_back)
    if expected is not None and expected is not holder:
        _switch(state, effects, group, holder, expected, now)


def _look_ahead(
    state: State, settings: Settings, group: Group, holder: Deployment, now: float
) -> PrefetchState | None:
    """While the holder works: the hint to prefetch the next member's state into host memory."""
    waiting = _waiting(state, group, now, besides=holder)
    if waiting:
        return prefetch(group, _first(state, settings, group, waiting, now), now)
    expected = expected_next(state, group, now)
    if expected is None or expected is holder:
        return None
    return prefetch(group, expected, now)


def successor(
    state: State, settings: Settings, effects: Effects, group: Group, now: float
) -> Deployment | None:
    """The member that gets the lock after the holder's offload.

    It is the incoming member, unless that was only expected and another one waits.
    """
    if group.incoming is None:
        return None
    incoming = state.deployments[group.incoming]
    if incoming.state is not _READY:
        return None
    if not wants_the_group(state, incoming, now):
        waiting = _waiting(state, group, now)
        if waiting:
            return _first_not_held_back(state, settings, effects, group, waiting, now) or incoming
    return incoming


def _grant(
    state: State, effects: Effects, group: Group, deployment: Deployment, now: float
) -> None:
    """Give the free lock to `deployment`, and load its state."""
    group_lock.grant(state, group, deployment.deployment)
    load(state, effects, group, deployment, now)


def load(
    state: State,
    effects: Effects,
    group: Group,
    deployment: Deployment,
    now: float,
    after: Deployment | None = None,
) -> None:
    """Start the load of the holder's last complete version. `after`: a filler that had the lock
    before, and whose job is billed."""
    deployment.switch_times.begin(now)
    wpg.begin_load(deployment)
    if group.prefetched == deployment.deployment:
        # After the next offload its state may lie on NVMe.
        group.prefetched = None
    seq = deployment.replay.durable_seq
    start_move(state, effects, group, deployment, _LOAD, seq, now, cause=after)


def _switch(
    state: State, effects: Effects, group: Group, holder: Deployment, rival: Deployment, now: float
) -> None:
    """Offload the holder; after that the lock goes to `rival`."""
    group_lock.begin_switch(group, rival.deployment)
    rival.switch_times.begin(now)
    _offload(state, effects, group, holder, now)


def _offload(state: State, effects: Effects, group: Group, holder: Deployment, now: float) -> None:
    """Offload the holder's state under a new token."""
    end_burst(holder, now)
    group_lock.fence(state, group)
    wpg.begin_offload(holder)
    incoming = None if group.incoming is None else state.deployments[group.incoming]
    cause = None if holder.preemptible else incoming
    seq = holder.replay.completed_seq
    start_move(state, effects, group, holder, _OFFLOAD, seq, now, cause=cause)


def end_burst(holder: Deployment, now: float) -> None:
    """End the holder's burst, and measure it if it ran something."""
    tokens = holder.burst.tokens
    length_s = holder.burst.end(now)
    if length_s is not None:
        holder.estimates.observe_burst(length_s, tokens)


def _dispatch(
    state: State, settings: Settings, effects: Effects, group: Group, holder: Deployment, now: float
) -> None:
    """Start the operations that may run at the same time: one, or several generations with at most
    one in-flight sync."""
    while True:
        head = next_operation(state, holder)
        if head is None or now < holder.backoff.until:
            return
        if holder.running:
            if head.token == group.token:
                # A retry needs a new token, so it waits for the runs under this one.
                return
            if head.kind != _GENERATE and not head.in_flight:
                return
            if any(each.kind != _GENERATE for each in holder.running.values()):
                return
            if head.kind == _GENERATE and _ends_its_generations(
                state, settings, group, holder, now
            ):
                return
        elif (
            holder.replay.log
            and now >= holder.no_snapshot_until
            and has_much_to_replay(state, settings, holder)
        ):
            _snapshot(state, effects, group, holder, now)
            return
        _go_on_with_burst(state, settings, holder, head, now)
        renew_token(state, group, head)
        holder.queue.pop(0)
        start(state, effects, group, holder, head, now)
        if head.kind != _GENERATE:
            return


def _snapshot(state: State, effects: Effects, group: Group, holder: Deployment, now: float) -> None:
    holder.burst.forget_pause()
    start_move(
        state, effects, group, holder, OperationKind.SNAPSHOT, holder.replay.completed_seq, now
    )


def _go_on_with_burst(
    state: State, settings: Settings, holder: Deployment, head: Operation, now: float
) -> None:
    """Add `head` to the holder's burst, or to a new one after a long pause."""
    idle_since = holder.burst.idle_since
    if holder.burst.started_at is not None and idle_since is not None and now > idle_since:
        if _is_after_burst(state, settings, holder, now - idle_since):
            end_burst(holder, now)
        elif head.submitted_at > idle_since:
            # An operation queued before the pause says nothing about the controller's pauses.
            holder.estimates.observe_gap(now - idle_since)
    _observe_pause(state, settings, holder, head)
    holder.burst.serve(head.tokens, now)


def _observe_pause(state: State, settings: Settings, holder: Deployment, head: Operation) -> None:
    """Measure the pause before `head`, if it is the first operation of a burst.

    A pause shorter than an offload and a load counts as a gap inside one burst: a switch split it
    because the controller's usual gap was unknown.
    """
    ended_at = holder.burst.ended_at
    if ended_at is None or holder.burst.served_at > ended_at or head.submitted_at <= ended_at:
        return
    pause_s = head.submitted_at - ended_at
    if _is_after_burst(state, settings, holder, pause_s):
        holder.estimates.observe_think(pause_s)
    else:
        holder.estimates.observe_gap(pause_s)


def _is_after_burst(
    state: State, settings: Settings, deployment: Deployment, pause_s: float
) -> bool:
    """Whether a pause is too long to be one inside a burst."""
    return pause_s > settings.config.burst_hold_s and pause_s > round_trip_s(state, deployment)


def _replay_next(
    state: State, effects: Effects, group: Group, holder: Deployment, now: float
) -> None:
    operation = state.operations[holder.replay.replaying[0]]
    renew_token(state, group, operation)
    start(state, effects, group, holder, operation, now, replay=True)
