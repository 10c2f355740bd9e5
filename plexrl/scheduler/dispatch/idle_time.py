"""Uses a group's idle time for a preemptible deployment, its filler.

A filler gets the lock only while no member wants it, and only if the time until the next expected
burst of a member is worth the switches: at least half of it must be left for the filler. It leaves
the lock as soon as a member wants it, and before an expected burst, so early that the member's
state is on the GPUs in time. Its running generations are interrupted: they end after the present
token, with what they have drawn, return to the queue, and are continued later.
"""

import math
from typing import Final

from plexrl.scheduler.rules.next_use import EXPECTED_PAUSES, usual_pause_s, worked_until
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.rules.switch_cost import load_s, offload_s
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationKind

_READY: Final = WpgState.READY
_GENERATE: Final = OperationKind.GENERATE

EARLY_FACTOR = 1.0
"""A member may come earlier than after its usual pause, by this multiple of the pause's usual
deviation."""


def may_fill(step: Step, group: Group, filler: Deployment) -> bool:
    """Whether the time until a member is expected is worth the switches to the filler and back. If
    not, a timer is set for when a late member is no longer expected."""
    state, now = step.state, step.now
    leave_at, again_at = _until(state, group, filler, now)
    away_s = 0.0 if group.holder is None else offload_s(state, state.deployments[group.holder])
    begin_s = away_s + load_s(state, filler)
    back_s = offload_s(state, filler)
    if leave_at - now >= 2.0 * begin_s + back_s:
        return True
    if again_at < math.inf:
        step.effects.wake(again_at, timers.group_step(group.group))
    return False


def must_leave(step: Step, group: Group, filler: Deployment) -> bool:
    """Whether the filler must leave the lock for a member that is expected. A timer is set for when
    that changes."""
    now = step.now
    leave_at, again_at = _until(step.state, group, filler, now)
    change_at = leave_at if now < leave_at else again_at
    if change_at < math.inf:
        step.effects.wake(change_at, timers.group_step(group.group))
    return now >= leave_at


def _until(state: State, group: Group, filler: Deployment, now: float) -> tuple[float, float]:
    """(when the filler has to leave for the member that is expected first, when the last of the
    late members is no longer expected). Infinite: never."""
    leave_at, again_at = math.inf, math.inf
    give_way_s = offload_s(state, filler)
    for name in group.members:
        member = state.deployments[name]
        if member.wpg.state is not _READY:
            # Nobody knows when its processes are ready; it gets the lock then.
            continue
        if now < member.wpg.backoff.until:
            return now, member.wpg.backoff.until
        pause_s, ended_at = usual_pause_s(member), worked_until(member)
        if member.work.queue or pause_s is None or ended_at is None:
            # Its operation waits for one of another deployment, or nothing is known of it.
            continue
        over_at = math.nextafter(ended_at + EXPECTED_PAUSES * pause_s, math.inf)
        if now >= over_at:
            # It may have stopped for good.
            continue
        early_s = EARLY_FACTOR * member.demand.estimates.think_deviation
        due_at = ended_at + max(0.0, pause_s - early_s)
        leave_at = min(leave_at, due_at - give_way_s - load_s(state, member))
        again_at = min(again_at, over_at)
    return leave_at, again_at
