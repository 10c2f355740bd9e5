"""Anticipation: an idle group switches to the member whose next burst is expected first.

A wrong prediction costs little: another member needs a switch in any case, and one that arrives
during the offload gets the group.
"""

from typing import Final

from plexrl.scheduler.dispatch.candidates.readiness import runs_on_stored_state
from plexrl.scheduler.placement.capacity.overlaps import has_exclusive_slots
from plexrl.scheduler.rules.next_use import EXPECTED_PAUSES, usual_pause_s
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Group, State

_READY: Final = WpgState.READY


def may_anticipate(settings: Settings, holder: Deployment) -> bool:
    """Whether the group may switch away from its idle holder: a burst of the holder has ended."""
    burst = holder.demand.burst
    return settings.anticipates and burst.started_at is None and burst.ended_at is not None


def expected_next(
    state: State, group: Group, now: float, *, critical: bool = False
) -> Deployment | None:
    """The member whose next burst is due first, by the end of its last one and its usual pause.

    `critical`: only among members with exclusive slots and empty queues.
    """
    deployments = state.deployments
    first_due: Deployment | None = None
    due_at = 0.0
    for name in group.members:
        member = deployments[name]
        ended_at = member.demand.burst.ended_at
        if ended_at is None or member.wpg.state is not _READY:
            continue
        pause_s = usual_pause_s(member)
        if pause_s is None or now < member.wpg.backoff.until:
            continue
        if now > ended_at + EXPECTED_PAUSES * pause_s:
            # It may have stopped for good.
            continue
        if runs_on_stored_state(member):
            continue
        if critical and (member.work.queue or not has_exclusive_slots(member)):
            continue
        at = ended_at + pause_s
        if first_due is None or at < due_at or (at == due_at and name < first_due.deployment):
            first_due, due_at = member, at
    return first_due
