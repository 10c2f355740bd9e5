"""When a WPG's state will be needed on the GPUs again; StateManagers spill what is needed last."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plexrl.scheduler.state.records import Deployment

OVERDUE_PART = 0.5
"""Of its usual pause, for which a member that is late is still expected at any moment."""


def next_use_s(member: "Deployment", now: float) -> float | None:
    """Seconds until a member is likely to need its state; None: nothing is known.

    One that has work waiting needs it as soon as its turn comes. Another is expected back its usual
    pause after its last burst; before one was seen, the mean pause of the cycle that was declared
    for it or remembered from an earlier job.
    """
    if member.queue or member.replaying:
        return 0.0
    pause_s, ended_at = _pause_s(member), worked_until(member)
    if pause_s is None or ended_at is None:
        return None
    due_s = ended_at + pause_s - now
    return None if due_s < -OVERDUE_PART * pause_s else max(0.0, due_s)


def worked_until(member: "Deployment") -> float | None:
    """When the last burst ended; that of a holder that has paused may be over too."""
    if member.burst_started_at is not None and member.idle_since is not None:
        return member.idle_since
    return member.burst_ended_at


def _pause_s(member: "Deployment") -> float | None:
    if member.estimates.think_seconds is not None:
        return member.estimates.think_seconds
    if member.trace is None:
        return None
    return (member.trace.period_s - member.trace.busy_s) / len(member.trace.segments)
