"""Keeps work without exclusive slots out of the critical segments of members that have some.

A *guest* is a member without exclusive slots: its plan overlaps another plan, or it has no profile
yet. Its burst starts only if the burst and the switch back end before the next critical segment of
a member with exclusive slots. Once the guest has waited too long (`hrrs.guard_ends_at`), it starts
anyway (PlexRL §4.4, §7.1).
"""

from plexrl.scheduler.dispatch.candidates.readiness import runs_on_stored_state
from plexrl.scheduler.placement.capacity.overlaps import has_exclusive_slots
from plexrl.scheduler.placement.contention.colocation import is_partner
from plexrl.scheduler.rules.hrrs import (
    Candidate,
    guard_ends_at,
    response_ratio,
    starves_at,
    waits_since,
)
from plexrl.scheduler.rules.next_use import is_overdue, next_use_s, usual_pause_s, worked_until
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.rules.switch_cost import round_trip_s
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.messages import PrefetchState


def next_critical_s(state: State, guest: Deployment, now: float) -> float | None:
    """Seconds to the next critical segment of another member of the guest's groups that has
    exclusive slots; None if none is expected.

    Predicted from the end of the member's last burst and its usual pause, which stay right when the
    member is late. The plan on the ring only decides who has exclusive slots.
    """
    soonest: float | None = None
    for name in [name for group in state.groups_of(guest) for name in group.members]:
        member = state.deployments[name]
        if member is guest or not has_exclusive_slots(member) or not member.wpg.is_ready:
            continue
        if is_partner(member, guest):
            # Its next burst follows that of its partner.
            continue
        pause_s, ended_at = usual_pause_s(member), worked_until(member)
        if pause_s is None or ended_at is None or member.work.queue:
            continue
        if member.work.running and not runs_on_stored_state(member):
            continue
        due_s = ended_at + pause_s - now
        if is_overdue(due_s, pause_s):
            continue
        due_s = max(0.0, due_s)
        if soonest is None or due_s < soonest:
            soonest = due_s
    return soonest


def holds_back(
    situation: Situation, guest: Deployment, burst: Candidate, now: float
) -> float | None:
    """Seconds until the guest's burst must be checked again; None: it may start now."""
    state, settings = situation.state, situation.settings
    if not settings.policy.guards_slack or has_exclusive_slots(guest):
        return None
    config, since = settings.config, waits_since(burst)
    if response_ratio(burst, now) >= config.starvation_ratio:
        return None
    if now >= starves_at(since, config.starvation_bound_s):
        return None
    critical_s = next_critical_s(state, guest, now)
    effective_s = burst.service_s + burst.setup_s
    if critical_s is None or effective_s + round_trip_s(state, guest) <= critical_s:
        return None
    ends_at = guard_ends_at(
        burst.arrived_at,
        since,
        effective_s,
        ratio=config.starvation_ratio,
        bound_s=config.starvation_bound_s,
    )
    return max(0.001, min(ends_at - now, critical_s + effective_s))


def prefetch(group: Group, deployment: Deployment, now: float) -> PrefetchState | None:
    """The prefetch hint for the member that is likely to be loaded next; None if it was the last
    one prefetched, or has no state yet."""
    if group.prefetched == deployment.deployment or not deployment.work.replay.durable_seq:
        return None
    group.prefetched = deployment.deployment
    return PrefetchState(
        deployment=deployment.deployment,
        seq=deployment.work.replay.durable_seq,
        nodes=deployment.placement.nodes,
        next_use_s=next_use_s(deployment, now),
    )
