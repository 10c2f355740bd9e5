"""Next step of a node group: lock holder, dispatch, context switch (PlexRL §4.4, §5.2.2).

A group's step follows each event that touches the group. The holder's burst continues while the
holder has operations. After the last one the holder keeps the lock for a moment, because the next
operation of a cycle usually follows at once. Then the member with the highest response ratio gets
the lock: the holder is offloaded, and the member's state is loaded under a new fencing token.

A member that spans several groups gets all their locks at once. If it goes first and
they are not all free, it reserves them as EASY backfilling does: another member starts only if it
ends, with the switch away from it, before the last of them is expected to be free.
"""

import math
from collections.abc import Sequence
from typing import Final

from plexrl.scheduler.dispatch.anticipation import expected_next, may_anticipate
from plexrl.scheduler.dispatch.bursts import (
    cut_burst,
    end_burst,
    go_on_with_burst,
    hold_s,
    interrupt_burst,
    is_after_burst,
    is_within_bound,
)
from plexrl.scheduler.dispatch.candidates.busy_time import expected_free_s, turn_s
from plexrl.scheduler.dispatch.candidates.group_shares import settle_all
from plexrl.scheduler.dispatch.candidates.ranking import first_of, stays_first
from plexrl.scheduler.dispatch.candidates.readiness import (
    candidate,
    next_operation,
    waiting_for,
    wants_the_group,
)
from plexrl.scheduler.dispatch.idle_time import may_fill, must_leave
from plexrl.scheduler.dispatch.slack_guard import holds_back, prefetch
from plexrl.scheduler.dispatch.stored_runs import leaves_its_step, start_stored_runs
from plexrl.scheduler.jobs.lifecycle import launch
from plexrl.scheduler.operations.deadlines.cancellation import interrupt_all
from plexrl.scheduler.operations.held.holding import renew_token
from plexrl.scheduler.operations.operations import start_move, start_run
from plexrl.scheduler.operations.replay import has_much_to_replay, leans_on_its_source
from plexrl.scheduler.placement.capacity.overlaps import has_exclusive_slots
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.recovery.evacuation import displace, leaving_fillers
from plexrl.scheduler.recovery.rebuilding import may_replay
from plexrl.scheduler.recovery.relocation import finish as finish_relocation
from plexrl.scheduler.recovery.relocation import is_due, is_stopping
from plexrl.scheduler.state import group_lock
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.records import Deployment, Group
from plexrl.wire.operations import OperationKind

_READY: Final = WpgState.READY
_LOAD: Final = OperationKind.LOAD
_OFFLOAD: Final = OperationKind.OFFLOAD
_GENERATE: Final = OperationKind.GENERATE


class GroupStep:
    """One step of one group, thrown away after it."""

    __slots__ = (
        *("_context", "_effects", "_group", "_groups", "_now", "_settings", "_state", "_step"),
    )

    def __init__(self, context: Context, group: Group, now: float) -> None:
        step = context.step(now)
        self._context, self._step, self._state = context, step, step.state
        self._groups = [group]
        """The group, or all groups of its holder."""
        if group.holder is not None:
            holder = step.state.deployments[group.holder]
            if len(holder.placement.groups) > 1:
                self._groups = step.state.groups_of(holder)
        self._settings, self._effects = step.settings, step.effects
        self._group, self._now = group, now

    def advance(self) -> None:
        """Decide and start the group's next step."""
        if self._context.cluster.queues.relocating and self._move_out():
            return
        if not self._group.members:
            for left in leaving_fillers(self._step, self._group):
                displace(self._context, left, "the members of its group have left", self._now)
            return
        start_stored_runs(self._step, self._group)
        if self._group.holder is None:
            self._give_free_lock()
            return
        holder = self._state.deployments[self._group.holder]
        wpg, work = holder.wpg, holder.work
        if wpg.moving is not None or wpg.state is not _READY:
            return
        if work.replay.replaying:
            held = self._now < wpg.backoff.until
            if not work.running and not held and may_replay(self._state, holder):
                self._replay_next(holder)
            return
        stops = wpg.moves.planned is not None and is_stopping(self._state, holder)
        if stops or (holder.spec.preemptible and self._gives_way(holder)):
            return
        if holder.spec.kind == "forward" and leans_on_its_source(holder, self._now):
            self._snapshot(holder)
            return
        is_idle = not work.running
        goes_on = is_idle and self._goes_on(holder)
        if is_idle and not goes_on:
            waiting = self._waiting(besides=holder)
            if waiting and self._may_be_relieved(holder, waiting):
                chosen = self._first_to_start(waiting)
                if chosen is not None:
                    self._give_to(chosen)
                    return
                if not work.queue:
                    # All waiting members are held back from a critical segment; the holder is idle.
                    end_burst(holder, self._now)
                    self._anticipate(holder, held_back=True)
                    return
            if not waiting and not self._wants(holder):
                filler = self._filler()
                if filler is not None and self._may_be_relieved(holder, [filler]):
                    self._give_to(filler)
                    return
            if not waiting and not work.queue:
                self._anticipate(holder)
                return
        if work.queue:
            if self._settings.policy.guards_slack and self._keeps_out(holder):
                return
            in_burst = goes_on and holder.demand.burst.started_at is not None
            if is_idle and not in_burst and self._yields(holder):
                return
            self._dispatch(holder)
        if work.running and self._context.cluster.capacity.inventory.spills(self._group):
            self._look_ahead(holder)

    def _give_free_lock(self) -> None:
        """Nobody holds the lock: give it to the member that goes first, or to a filler."""
        if self._group.incoming is not None:
            # It awaits the offloads on its other groups.
            return
        waiting = self._waiting()
        settle_all(self._step, self._groups, waiting)
        chosen = self._first_to_start(waiting)
        if chosen is None and not waiting:
            chosen = self._filler()
        if chosen is not None:
            self._give_to(chosen)

    def _filler(self) -> Deployment | None:
        """A filler with work for which there is time, while no member wants the group."""
        for name in self._group.fillers:
            filler = self._state.deployments[name]
            if self._wants(filler) and may_fill(self._step, self._group, filler):
                return filler
        return None

    def _gives_way(self, filler: Deployment) -> bool:
        """Whether the filler that holds the group starts nothing more. If so, it is interrupted, or
        the group is switched."""
        waiting = self._waiting()
        goes_on = not waiting and (filler.work.running or self._wants(filler))
        if goes_on and not must_leave(self._step, self._group, filler):
            return False
        if filler.work.running:
            interrupt_all(self._step, filler)
            return True
        end_burst(filler, self._now)
        settle_all(self._step, self._groups, waiting)
        chosen = self._first_to_start(waiting)
        if chosen is None and self._settings.anticipates:
            chosen = self._expected_next(critical=bool(waiting))
        if chosen is not None:
            self._give_to(chosen)
        return True

    def _waiting(self, besides: Deployment | None = None) -> list[Deployment]:
        """All members of the groups that want them, except `besides`."""
        return waiting_for(self._state, self._groups, besides, self._now)

    def _wants(self, member: Deployment) -> bool:
        return wants_the_group(self._state, member, self._now)

    def _first_to_start(self, waiting: Sequence[Deployment]) -> Deployment | None:
        """The first of `waiting` that is not held back from a critical segment, and whose groups
        are all free for it. One that has to wait for its groups reserves them: after it only those
        may start that end before."""
        guards = self._settings.policy.guards_slack
        left, reserved_s = list(waiting), math.inf
        while left:
            chosen = first_of(self._step, left, self._now)
            if not (guards and self._held_back(chosen)):
                wait_s = 0.0
                if len(chosen.placement.groups) > 1:
                    wait_s = self._free_in_s(chosen, is_first=reserved_s == math.inf)
                if wait_s > 0.0:
                    reserved_s = min(reserved_s, wait_s)
                elif reserved_s == math.inf or turn_s(self._state, chosen) <= reserved_s:
                    return chosen
            left.remove(chosen)
        return None

    def _yields(self, holder: Deployment) -> bool:
        """Whether the holder's next burst does not begin because a member that spans several groups
        goes before it, and gets the groups or has reserved them."""
        if holder.spec.preemptible or self._is_in_burst(holder) or not self._wants(holder):
            return False
        waiting = self._waiting(besides=holder)
        if not any(each.placement.spans for each in waiting):
            return False
        chosen = self._first_to_start([holder, *waiting])
        if chosen is not None and chosen is not holder:
            self._give_to(chosen)
        return chosen is not holder

    def _free_in_s(self, member: Deployment, *, is_first: bool) -> float:
        """Estimated seconds until `member`, which spans several groups, could have them all; 0:
        now. `is_first`: no other member goes before it here."""
        longest_s = 0.0
        for group in self._state.groups_of(member):
            if group in self._groups:
                continue
            step = GroupStep(self._context, group, self._now)
            longest_s = max(longest_s, step.free_in_s(member, is_first=is_first))
        return longest_s

    def free_in_s(self, member: Deployment, *, is_first: bool = False) -> float:
        """Estimated seconds until the group could be given to `member`, which spans it and others;
        0: now. `is_first`: it goes first elsewhere, so that who goes before it here may start."""
        group, holder = self._group, None
        later_s = expected_free_s(self._state, group, self._now)
        if group.incoming is not None:
            return later_s
        if group.holder is not None:
            holder = self._state.deployments[group.holder]
            if holder is member:
                return 0.0
            wpg = holder.wpg
            busy = wpg.moving is not None or wpg.state is not _READY or holder.work.running
            stays = holder.work.replay.replaying or holder.wpg.moves.planned is not None
            if busy or stays or self._is_in_burst(holder):
                return later_s
        guards = self._settings.policy.guards_slack
        rivals = [
            each
            for each in self._waiting(besides=holder)
            if each is not member
            and group.group in each.placement.groups
            and not (guards and self._held_back(each))
        ]
        goes_first = not rivals or first_of(self._step, [member, *rivals], self._now) is member
        if goes_first and (
            holder is None or holder.spec.preemptible or self._may_be_relieved(holder, [member])
        ):
            return 0.0
        if is_first:
            # The order changes with time. It ascends from group to group, so this ends.
            self._effects.touch(group.group)
        return later_s

    def _held_back(self, chosen: Deployment) -> bool:
        """Whether the next burst must stay out of a critical segment; if so, sets a timer."""
        if has_exclusive_slots(chosen):
            return False
        asked = candidate(self._state, chosen)
        wait_s = holds_back(self._step, chosen, asked, self._now)
        if wait_s is None:
            return False
        self._effects.wake(self._now + wait_s, timers.group_step(self._group.group))
        return True

    def _keeps_out(self, holder: Deployment) -> bool:
        """Whether a resident guest must not begin its next burst: the group goes to who is
        expected."""
        if holder.work.running or holder.spec.preemptible or not self._wants(holder):
            return False
        started_at, idle_since = holder.demand.burst.started_at, holder.demand.burst.idle_since
        pause_s = 0.0 if idle_since is None else self._now - idle_since
        if started_at is not None and not is_after_burst(self._step, holder, pause_s):
            return False
        if not self._held_back(holder):
            return False
        end_burst(holder, self._now)
        self._anticipate(holder, held_back=True)
        return True

    def _move_out(self) -> bool:
        """Continue the moves of members that are between operations. True if the group must
        wait."""
        for name in list(self._group.members):
            member = self._state.deployment(name)
            if not is_due(self._state, member):
                continue
            if member.wpg.residency == Residency.DEVICE and self._group.holder == name:
                self._offload(member)
                return True
            if member.wpg.residency == Residency.DEVICE:
                continue
            if finish_relocation(self._context, member, self._now):
                if member.wpg.state == WpgState.RECOVERING:
                    launch(self._step, member)
                self._effects.touch_all(member.placement.groups)
        return self._group.group not in self._state.groups

    def _goes_on(self, holder: Deployment) -> bool:
        """Whether the holder's burst continues, even if others wait."""
        if not holder.work.queue or not self._settings.ordering.holds_bursts:
            return False
        leaves = leaves_its_step(self._state, holder) and self._waiting(besides=holder)
        return not leaves and self._wants(holder) and is_within_bound(self._step, holder)

    def _is_in_burst(self, holder: Deployment) -> bool:
        """Whether a burst of the holder is under way, and continues."""
        return holder.demand.burst.started_at is not None and self._goes_on(holder)

    def _ends_its_generations(self, holder: Deployment) -> bool:
        """Whether a rollout's burst has reached its bound and others wait: the generations that run
        go on to their end, and no other one begins."""
        if all(len(group.members) == 1 for group in self._groups) or self._goes_on(holder):
            return False
        return bool(self._waiting(besides=holder))

    def _may_be_relieved(self, holder: Deployment, waiting: Sequence[Deployment]) -> bool:
        """Whether one of `waiting` may take the lock now. It may restart the burst or set a
        timer."""
        ordering, burst = self._settings.ordering, holder.demand.burst
        leaves = leaves_its_step(self._state, holder)
        if self._wants(holder) and not leaves:
            settle_all(self._step, self._groups, [holder, *waiting])
            if not stays_first(self._step, holder, waiting, self._now):
                return True
            if ordering.holds_bursts:
                cut_burst(self._step, holder)
            return False
        if burst.idle_since is not None and ordering.holds_bursts and not leaves:
            until = burst.idle_since + hold_s(self._step, holder)
            if self._now < until:
                self._effects.wake(until, timers.group_step(self._group.group))
                return False
        settle_all(self._step, self._groups, waiting)
        return True

    def _anticipate(self, holder: Deployment, *, held_back: bool = False) -> None:
        """Switch an idle group to the member whose next burst is expected first. With `held_back`,
        waiting members are held back for one with exclusive slots, and only such a member is
        chosen."""
        if not may_anticipate(self._settings, holder):
            return
        expected = self._expected_next(critical=held_back)
        if expected is not None and expected is not holder:
            self._give_to(expected)

    def _expected_next(self, *, critical: bool = False) -> Deployment | None:
        """The member whose next burst is due first, if the locks of all its groups are idle."""
        expected = expected_next(self._state, self._group, self._now, critical=critical)
        if expected is None or not (expected.placement.spans or len(self._groups) > 1):
            return expected
        for group in self._state.groups_of(expected):
            if group not in self._groups:
                step = GroupStep(self._context, group, self._now)
                if group.incoming is not None or step._waiting() or step.free_in_s(expected):
                    return None
        return expected

    def _look_ahead(self, holder: Deployment) -> None:
        """While the holder works: prefetch the next member's state into host memory."""
        group, now, waiting = self._group, self._now, self._waiting(besides=holder)
        expected = None if waiting else expected_next(self._state, group, now)
        if waiting:
            expected = first_of(self._step, waiting, now)
        if expected is None or expected is holder:
            return
        hint = prefetch(group, expected, now)
        if hint is not None:
            self._effects.emit(hint)

    def successor(self) -> Deployment | None:
        """The member that gets the lock after the holder's offload.

        It is the incoming member, unless that was only expected and another one waits.
        """
        if self._group.incoming is None:
            return None
        incoming = self._state.deployments[self._group.incoming]
        if incoming.wpg.state is not _READY:
            return None
        if not self._wants(incoming):
            waiting = self._waiting()
            if waiting:
                chosen = self._first_to_start(waiting) or incoming
                # One that spans groups, or of several groups, is left to their next steps.
                return None if chosen.placement.spans or len(self._groups) > 1 else chosen
        return incoming

    def _give_to(self, chosen: Deployment) -> None:
        """Give the locks of its groups to `chosen`, after the offloads of their holders, and load
        its state."""
        state = self._state
        if len(chosen.placement.groups) > 1:
            found = [group.holder for group in state.groups_of(chosen) if group.holder is not None]
            holders = list(dict.fromkeys(found))
        else:
            holders = [] if self._group.holder is None else [self._group.holder]
        if not holders:
            group_lock.grant(state, chosen)
            self.load(chosen)
            return
        group_lock.begin_switch(state, chosen)
        chosen.demand.switch_times.begin(self._now)
        for holder in holders:
            self._offload(state.deployments[holder])

    def load(self, deployment: Deployment, after: Deployment | None = None) -> None:
        """Start the load of the holder's last complete version. `after`: a filler that had the lock
        before, and whose job is billed."""
        deployment.demand.switch_times.begin(self._now)
        deployment.wpg.begin_load()
        for group in self._state.groups_of(deployment):
            if group.prefetched == deployment.deployment:
                # After the next offload its state may lie on NVMe.
                group.prefetched = None
            for name in group.members:
                member = self._state.deployments[name]
                groups = member.placement.groups
                if len(groups) > 1 and member.work.queue and member is not deployment:
                    # What it has reserved on its other groups is free for longer now.
                    self._effects.touch_all(groups)
        start_move(self._step, deployment, _LOAD, deployment.work.replay.durable_seq, cause=after)

    def _offload(self, holder: Deployment) -> None:
        """Offload the holder's state under a new token."""
        state, is_cut = self._state, self._settings.ordering.holds_bursts and self._wants(holder)
        if is_cut and not leaves_its_step(state, holder):
            interrupt_burst(self._step, holder)
        else:
            end_burst(holder, self._now)
        groups = state.groups_of(holder)
        group_lock.fence(state, groups)
        holder.wpg.begin_offload()
        incoming = [group.incoming for group in groups if group.incoming is not None]
        cause = None
        if incoming and not holder.spec.preemptible:
            cause = state.deployments[incoming[0]]
        start_move(self._step, holder, _OFFLOAD, holder.work.replay.completed_seq, cause=cause)

    def _dispatch(self, holder: Deployment) -> None:
        """Start the operations that may run at the same time: one, or several generations with at
        most one in-flight sync."""
        state, now = self._state, self._now
        wpg, work = holder.wpg, holder.work
        while True:
            head = next_operation(state, holder)
            if head is None or now < wpg.backoff.until:
                return
            if work.running:
                if head.token == self._group.token:
                    # A retry needs a new token, so it waits for the runs under this one.
                    return
                if head.kind != _GENERATE and not head.in_flight:
                    return
                if any(each.kind != _GENERATE for each in work.running.values()):
                    return
                if head.kind == _GENERATE and self._ends_its_generations(holder):
                    return
            elif (
                work.replay.log
                and now >= wpg.no_snapshot_until
                and has_much_to_replay(self._step, holder)
            ):
                self._snapshot(holder)
                return
            go_on_with_burst(self._step, holder, head)
            renew_token(state, holder, head)
            work.take_head()
            start_run(self._step, holder, head)
            if head.kind != _GENERATE:
                return

    def _snapshot(self, holder: Deployment) -> None:
        holder.demand.burst.forget_pause()
        start_move(self._step, holder, OperationKind.SNAPSHOT, holder.work.replay.completed_seq)

    def _replay_next(self, holder: Deployment) -> None:
        operation = self._state.operations[holder.work.replay.replaying[0]]
        renew_token(self._state, holder, operation)
        start_run(self._step, holder, operation, replay=True)
