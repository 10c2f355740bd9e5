"""Bursts of a lock's holder: which operations belong to one, and the pauses before and in them."""

from plexrl.scheduler.rules.settings import Settings, Situation, Step
from plexrl.scheduler.rules.switch_cost import round_trip_s
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment

GAP_MARGIN = 4.0
"""Maximum wait for the holder's next operation, as a multiple of the usual gap in its bursts."""


def go_on_with_burst(step: Step, holder: Deployment, head: Operation) -> None:
    """Add `head` to the holder's burst, or to a new one after a long pause."""
    now = step.now
    burst = holder.demand.burst
    started_at, idle_since = burst.started_at, burst.idle_since
    if started_at is not None and idle_since is not None and now > idle_since:
        if is_after_burst(step, holder, now - idle_since):
            end_burst(holder, now)
        elif head.submitted_at > idle_since:
            # An operation queued before the pause says nothing about the controller's pauses.
            holder.demand.estimates.observe_gap(now - idle_since)
    ended_at = burst.ended_at
    if ended_at is not None and burst.served_at <= ended_at < head.submitted_at:
        _observe_pause(step, holder, head.submitted_at - ended_at)
    burst.serve(head.tokens, now)


def is_within_bound(settings: Settings, holder: Deployment, now: float) -> bool:
    """Whether the holder's burst is shorter than `burst_max_s`, for which it may hold the group
    though others wait."""
    began_at = holder.demand.burst.started_at
    return now - (began_at if began_at is not None else now) < settings.config.burst_max_s


def is_after_burst(situation: Situation, deployment: Deployment, pause_s: float) -> bool:
    """Whether a pause is too long to be one inside a burst."""
    if pause_s <= situation.settings.config.burst_hold_s:
        return False
    return pause_s > round_trip_s(situation.state, deployment)


def hold_s(situation: Situation, holder: Deployment) -> float:
    """Maximum wait for the next operation of a burst: at most the time of a switch away and
    back."""
    usual_s = GAP_MARGIN * (holder.demand.estimates.gap_seconds or 0.0)
    return min(
        max(situation.settings.config.burst_hold_s, usual_s), round_trip_s(situation.state, holder)
    )


def end_burst(holder: Deployment, now: float) -> None:
    """End the holder's burst, and measure it if it ran something."""
    tokens = holder.demand.burst.tokens
    length_s = holder.demand.burst.end(now)
    if length_s is not None:
        holder.demand.estimates.observe_burst(length_s, tokens)


def _observe_pause(situation: Situation, holder: Deployment, pause_s: float) -> None:
    """Measure the pause before the first operation of a burst.

    A pause shorter than an offload and a load counts as a gap inside one burst: a switch split it
    because the controller's usual gap was unknown.
    """
    if is_after_burst(situation, holder, pause_s):
        holder.demand.estimates.observe_think(pause_s)
    else:
        holder.demand.estimates.observe_gap(pause_s)
