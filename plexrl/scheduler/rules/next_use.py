"""Predicts when a WPG's state will be needed on the GPUs again. StateManagers evict the state with
the latest next use first.

The owner of all rules about how long a member that paused is still expected.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plexrl.scheduler.state.records import Deployment

OVERDUE_PART = 0.5
"""A late member is expected until it is late by more than this part of its usual pause."""

EXPECTED_PAUSES = 2.0
"""An idle group switches ahead for a member until this many usual pauses after its last burst."""


def next_use_s(member: "Deployment", now: float) -> float | None:
    """Seconds until a member is likely to need its state; None if unknown.

    A member with waiting work needs its state as soon as it gets the group. Any other member is
    expected one usual pause after its last burst.
    """
    if member.work.queue or member.work.replay.replaying:
        return 0.0
    pause_s, ended_at = usual_pause_s(member), worked_until(member)
    if pause_s is None or ended_at is None:
        return None
    due_s = ended_at + pause_s - now
    return None if is_overdue(due_s, pause_s) else max(0.0, due_s)


def is_overdue(due_s: float, pause_s: float) -> bool:
    """Whether a member that is due in `due_s` (negative: late) is no longer expected."""
    return due_s < -OVERDUE_PART * pause_s


def worked_until(member: "Deployment") -> float | None:
    """When the last burst ended; for a holder that pauses, when the pause began."""
    if member.demand.burst.started_at is not None and member.demand.burst.idle_since is not None:
        return member.demand.burst.idle_since
    return member.demand.burst.ended_at


def usual_pause_s(member: "Deployment") -> float | None:
    """From the end of a burst to the arrival of the next one: as measured; before the first
    measurement the mean pause of the declared or remembered cycle; None if unknown."""
    if member.demand.estimates.think_seconds is not None:
        return member.demand.estimates.think_seconds
    if member.demand.trace is None:
        return None
    return (member.demand.trace.period_s - member.demand.trace.busy_s) / len(
        member.demand.trace.segments
    )
