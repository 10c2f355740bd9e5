"""What the next moments of a group will bring: slack of critical segments, and prefetches.

Work of a member that has no time of its own reserved (it overlaps by the plan, or was backfilled
before it had a profile) starts only if it and the switch back end before the next critical segment
of a member that has, unless its response ratio has passed the starvation bound (PlexRL §4.4, §7.1).
"""

from plexrl.scheduler.capacity.overlaps import owns_time
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.dispatch.hrrs import Candidate, response_ratio
from plexrl.scheduler.dispatch.next_use import OVERDUE_PART, next_use_s, worked_until
from plexrl.scheduler.dispatch.switch_cost import round_trip_s
from plexrl.scheduler.state.commands import PrefetchState
from plexrl.scheduler.state.records import Deployment, Group


def next_critical_s(
    context: Context, group: Group, besides: Deployment, now: float
) -> float | None:
    """Seconds to the next critical segment of a member with time of its own; None: none expected.

    From when the member's last burst ended and how long it usually pauses, which follows it through
    every delay; the ring's plan only says who has time of their own.
    """
    soonest: float | None = None
    for name in group.members:
        member = context.deployment(name)
        if member is besides or not owns_time(member) or not member.is_ready:
            continue
        think_s, ended_at = member.estimates.think_seconds, worked_until(member)
        if think_s is None or ended_at is None or member.queue or member.running:
            continue
        due_s = ended_at + think_s - now
        if due_s < -OVERDUE_PART * think_s:
            continue
        due_s = max(0.0, due_s)
        if soonest is None or due_s < soonest:
            soonest = due_s
    return soonest


def holds_back(
    context: Context, group: Group, guest: Deployment, burst: Candidate, now: float
) -> float | None:
    """Seconds that `guest`'s burst should still be held back for a critical segment; None: start.

    The time returned is when to look again, not a promise.
    """
    if not context.policy.guards_slack or owns_time(guest):
        return None
    config = context.config
    if response_ratio(burst, now) >= config.starvation_ratio:
        return None
    starves_at = max(burst.arrived_at, burst.served_at) + config.starvation_bound_s
    if now >= starves_at:
        return None
    critical_s = next_critical_s(context, group, guest, now)
    if critical_s is None:
        return None
    if burst.service_s + burst.setup_s + round_trip_s(context, guest) <= critical_s:
        return None
    effective_s = burst.service_s + burst.setup_s
    patience_s = (config.starvation_ratio - 1.0) * effective_s
    left_s = min(burst.arrived_at + patience_s, starves_at) - now
    return max(0.001, min(left_s, critical_s + effective_s))


def prefetch(context: Context, group: Group, deployment: Deployment, now: float) -> None:
    """Hint that `deployment` is likely to be loaded next, where its state may lie on NVMe."""
    if group.prefetched == deployment.deployment or not deployment.durable_seq:
        return
    group.prefetched = deployment.deployment
    if context.inventory.spills(group):
        context.emit(
            PrefetchState(
                deployment=deployment.deployment,
                seq=deployment.durable_seq,
                nodes=deployment.nodes,
                next_use_s=next_use_s(deployment, now),
            )
        )
