"""Bursts of a lock's holder: which operations belong to one, and the pauses before and in them."""

from plexrl.scheduler.rules.settings import Situation, Step
from plexrl.scheduler.rules.switch_cost import interruption_s, round_trip_s
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment

GAP_MARGIN = 4.0
"""Maximum wait for the holder's next operation, as a multiple of the usual gap in its bursts."""

USUAL_MARGIN = 3.0
"""A burst that is longer than this multiple of the usual ones is not of usual length."""

USUAL_FACTOR = 5.0
"""A burst of usual length may hold the group for this multiple of the bound of others. An
interruption gains nothing by itself: of two equal bursts that are cut in turns both end late."""

BOUND_S_MIN = 1.0
"""The least bound of a burst: first loads of small states are predicted to take no time."""


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
    stepped_at = burst.stepped_at
    if stepped_at is not None and head.kind not in holder.spec.stored_kinds:
        paused = is_after_burst(step, holder, head.submitted_at - stepped_at)
        holder.demand.estimates.observe_after_step(paused=paused)
        burst.follow_step()
    burst.serve(head.tokens, now)


def is_within_bound(step: Step, holder: Deployment) -> bool:
    """Whether the holder's burst may go on though others wait."""
    began_at = holder.demand.burst.started_at
    return began_at is None or step.now - began_at < bound_s(step, holder)


def bound_s(situation: Situation, holder: Deployment) -> float:
    """For how many seconds the holder's burst may hold the group though others wait.

    It is `burst_interruptions` times what an interruption costs, so that interruptions take 5 % of
    the time at most, whatever is declared and however long operations take. A burst of usual length
    may go on to `USUAL_MARGIN` times that length, and for `USUAL_FACTOR` times the bound at most.
    """
    config = situation.settings.config
    if not config.burst_interruptions:
        return config.burst_max_s
    cost_s = config.burst_interruptions * interruption_s(situation.state, holder)
    left_s = USUAL_MARGIN * _usual_s(holder.demand, config.burst_max_s) - holder.demand.burst.cut_s
    return min(config.burst_max_s, max(cost_s, min(left_s, USUAL_FACTOR * cost_s), BOUND_S_MIN))


def _usual_s(demand: Demand, longest_s: float) -> float:
    """Usual seconds of a burst until the controller pauses: as measured, otherwise by the declared
    or remembered cycle; 0: unknown, or longer than any cycle is."""
    usual_s = demand.estimates.burst_s(demand.burst.tokens)
    if not usual_s and demand.trace is not None:
        usual_s = max([segment.duration_s for segment in demand.trace.segments], default=0.0)
    return usual_s if usual_s <= longest_s else 0.0


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


def cut_burst(step: Step, holder: Deployment) -> None:
    """Others wait, and the holder goes first again: the next part of its burst begins."""
    if step.settings.config.burst_interruptions:
        holder.demand.burst.cut(step.now)
    else:
        holder.demand.burst.begin(step.now)


def interrupt_burst(step: Step, holder: Deployment) -> None:
    """Others get the group; operations of the holder's burst are left. Without
    `burst_interruptions` each part counts as a burst, as a scheduler of before that setting
    decided."""
    if step.settings.config.burst_interruptions:
        holder.demand.burst.suspend(step.now)
    else:
        end_burst(holder, step.now)


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
    estimates, burst = holder.demand.estimates, holder.demand.burst
    if is_after_burst(situation, holder, pause_s):
        estimates.observe_think(pause_s)
        if burst.cut_s:
            # The controller paused. What was left when the burst was last cut was cancelled, or ran
            # on the stored state.
            estimates.observe_burst(burst.cut_s, burst.tokens)
            burst.begin_anew()
    else:
        estimates.observe_gap(pause_s)
