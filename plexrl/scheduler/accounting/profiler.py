"""Profiler: measures a deployment's demand trace from its runs (PlexRL §4.3.2, §5.2.1).

A cycle lasts from the first operation after a publish to the first one after the next publish. In
jobs that never publish, an optimizer step ends the cycle; in forward deployments, a `forward` does.
A rollout's cycle begins with a sync after a generation; if it never syncs, with each `generate`.
Rollouts that sync at moments of their own cause several publishes in one step. So a publish ends a
cycle only after an optimizer step in it, and further publishes belong to the cycle that has ended.
The cycle's clock stops while the deployment waits for the group, so a trace shows the job as it
would run alone. It does not stop for waiting that delays nothing: the rollouts of an asynchronous
job generated meanwhile, and the trainer waited for them afterwards. The trace is the median of
several cycles after the warm-up. Only cycles with the most common number of segments count, so
stragglers, checkpoints and evaluations do not distort it.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Final

from plexrl.scheduler.rules.settings import ProfilerConfig
from plexrl.scheduler.state.demand.trace import (
    PERIOD_S_MAX,
    PERIOD_S_MIN,
    SEGMENTS_MAX,
    DemandTrace,
    Segment,
)
from plexrl.scheduler.state.deployment.cycles import BusySpan, Cycle, OpenCycle
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.operations import OperationKind

MERGE_PART = 0.02
"""Segments are merged if their gap is a smaller part of the period: the controller's own steps."""

MAD_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, for a normal distribution."""

DRIFT_CYCLES = 3
"""Consecutive deviating cycles that renew a profile: one slow step is no drift."""

SAME_SPAN_S = 1e-3
"""Shorter pauses between two runs are ignored."""

SPANS_MAX = 1024
"""Maximum number of spans of a cycle; a plan could not use more."""


_PUBLISH: Final = OperationKind.PUBLISH
_SYNC: Final = OperationKind.SYNC_WEIGHTS
_GENERATE: Final = OperationKind.GENERATE
_FORWARD: Final = OperationKind.FORWARD
_OPTIM_STEP: Final = OperationKind.OPTIM_STEP


def waits(deployment: Deployment, now: float) -> bool:
    """Whether an operation that starts now has waited for the group."""
    since = deployment.demand.burst.wants_since
    return since is not None and since < now


def run_began(deployment: Deployment, now: float, *, overlapped: bool) -> None:
    """An operation starts on the group: record its wait, and the start of a cycle. `overlapped`: a
    rollout of the job generates, as it did during the wait."""
    demand = deployment.demand
    wants_since, cycle = demand.burst.wants_since, demand.cycles.open
    since = now if wants_since is None else wants_since
    demand.burst.stop_wanting()
    if cycle is None:
        cycle = demand.cycles.begin(since)
    if now > since:
        cycle.waited_s += now - since
        if overlapped:
            cycle.hidden_s += now - since


def run_ended(
    deployment: Deployment, kind: OperationKind, began_at: float, now: float, *, overlapped: bool
) -> None:
    """An operation has ended. `overlapped`: a rollout of the job was running at that time, so the
    operations that follow may not depend on this one."""
    cycle = deployment.demand.cycles.open
    if cycle is None:
        return
    offset_s = began_at - cycle.started_at - cycle.waited_s
    if offset_s < 0.0:
        offset_s = 0.0
    spans = cycle.spans
    last = spans[-1] if spans else None
    if last is not None and offset_s - last.offset_s - last.duration_s <= SAME_SPAN_S:
        end_s = max(last.offset_s + last.duration_s, offset_s + now - began_at)
        # Several generations run at the same time: this one may have begun before others ended.
        while len(spans) > 1 and offset_s <= spans[-2].offset_s + spans[-2].duration_s:
            spans.pop()
        last = spans[-1]
        last.offset_s = min(last.offset_s, offset_s)
        last.duration_s = end_s - last.offset_s
        last.overlapped = overlapped
    elif len(spans) < SPANS_MAX:
        spans.append(BusySpan(offset_s, now - began_at, overlapped))
    if kind in (_OPTIM_STEP, _GENERATE):
        deployment.demand.cycles.step()
    if not cycle.ends:
        cycle.ends = _is_end(deployment, cycle, kind)


def stored_run_ended(deployment: Deployment, kind: OperationKind) -> None:
    """A run on the stored state has ended, which took no time of the group. A step counts as one of
    the cycle; a checkpoint is outside of any cycle."""
    cycle = deployment.demand.cycles.open
    if cycle is None or kind is not _OPTIM_STEP:
        return
    deployment.demand.cycles.step()
    if not cycle.ends:
        cycle.ends = _is_end(deployment, cycle, _OPTIM_STEP)


def next_began(deployment: Deployment, kind: OperationKind, now: float) -> bool:
    """An operation is about to start. If the cycle has ended, the next one began when this
    operation could first have run. True if a cycle has ended."""
    cycles = deployment.demand.cycles
    cycle = cycles.open
    if deployment.spec.kind == "rollout":
        if kind == _SYNC:
            cycles.divide_by_publish()
        first = _SYNC if cycles.publishes else _GENERATE
        if cycle is None or not cycle.has_step or kind != first or deployment.work.running:
            return False
    elif cycle is None or not cycle.ends or kind == _PUBLISH:
        return False
    wants_since = deployment.demand.burst.wants_since
    since = now if wants_since is None else wants_since
    cycles.begin(since)
    if cycles.count():
        length_s = max(1e-6, since - cycle.started_at)
        busy_s = 0.0
        for span in cycle.spans:
            busy_s += span.duration_s
        waited_s = min(cycle.waited_s, length_s)
        if cycle.hidden_s and cycle.spans:
            last = cycle.spans[-1]
            idle_s = length_s - waited_s - last.offset_s - last.duration_s
            if idle_s > MERGE_PART * length_s:
                waited_s = max(0.0, waited_s - cycle.hidden_s)
        cycles.add(Cycle(cycle.started_at, length_s, waited_s, busy_s, tuple(cycle.spans)))
    return True


def forget_open_cycle(deployment: Deployment) -> None:
    """Drop the open cycle: its workers were lost or moved."""
    deployment.demand.cycles.restart()
    deployment.demand.burst.stop_wanting()


def profile(cycles: Sequence[Cycle]) -> DemandTrace | None:
    """The median demand trace of these cycles, at least one; None if they have no busy time."""
    periods = [cycle.length_s - cycle.waited_s for cycle in cycles]
    period_s = median(periods)
    if not PERIOD_S_MIN <= period_s <= PERIOD_S_MAX:
        return None
    merged = [_merge(cycle.spans, MERGE_PART * period_s) for cycle in cycles]
    counts = Counter(len(each) for each in merged if each)
    if not counts:
        return None
    # The commonest number of segments; of equally common ones the smaller.
    usual = min(counts, key=lambda count: (-counts[count], count))
    if usual > SEGMENTS_MAX:
        return None
    agreeing = [each for each in merged if len(each) == usual]
    segments: list[Segment] = []
    end_s = 0.0
    for index in range(usual):
        offset_s = max(end_s, median(each[index].offset_s for each in agreeing))
        duration_s = median(each[index].duration_s for each in agreeing)
        duration_s = min(duration_s, period_s - offset_s)
        if duration_s <= 0:
            break
        free = sum(each[index].overlapped for each in agreeing) * 2 > len(agreeing)
        segments.append(Segment(offset_s=offset_s, duration_s=duration_s, slack_s=float(free)))
        end_s = offset_s + duration_s
    if not segments:
        return None
    return DemandTrace(
        period_s=period_s,
        segments=_with_slack(segments, period_s),
        jitter_s=MAD_TO_DEVIATION * median(abs(period - period_s) for period in periods),
        cycles=len(cycles),
    )


def refresh(deployment: Deployment, config: ProfilerConfig) -> bool:
    """Measure the deployment's trace, or renew it after a drift. True if the trace changed."""
    cycles = deployment.demand.cycles.measured
    trace = deployment.demand.trace
    is_begun = trace is not None and config.first <= trace.cycles < config.cycles
    if trace is None or not trace.cycles or is_begun:
        if len(cycles) < _least_cycles(trace, config):
            return False
        measured = profile(cycles)
        if measured is None:
            return False
        deployment.demand.know(measured)
        return True
    if len(cycles) < DRIFT_CYCLES or _fits(trace, cycles[-1], config.drift_tolerance):
        # The usual case: the older cycles need no check.
        return False
    if not has_drifted(trace, cycles[-DRIFT_CYCLES:], config.drift_tolerance):
        return False
    renewed = profile(cycles[-DRIFT_CYCLES:])
    if renewed is None:
        return False
    deployment.demand.know(renewed)
    return True


def _least_cycles(trace: DemandTrace | None, config: ProfilerConfig) -> int:
    """Measured cycles that replace an incomplete trace. What was declared, and the median of
    others, say more than one cycle."""
    if trace is None:
        return config.first
    return trace.cycles + 1 if trace.cycles else config.cycles


def has_drifted(trace: DemandTrace, cycles: Sequence[Cycle], tolerance: float) -> bool:
    """Whether all of the newest cycles deviate from the trace in the same direction."""
    if len(cycles) < DRIFT_CYCLES:
        return False
    period_s, busy_s = trace.period_s, trace.busy_s
    periods = [(cycle.length_s - cycle.waited_s) / period_s - 1.0 for cycle in cycles]
    if min(periods) > tolerance or max(periods) < -tolerance:
        return True
    busies = [cycle.busy_s / busy_s - 1.0 for cycle in cycles]
    return min(busies) > tolerance or max(busies) < -tolerance


def _fits(trace: DemandTrace, cycle: Cycle, tolerance: float) -> bool:
    """Whether a cycle agrees with the trace, so that there is no drift."""
    if abs((cycle.length_s - cycle.waited_s) / trace.period_s - 1.0) > tolerance:
        return False
    return abs(cycle.busy_s / trace.busy_s - 1.0) <= tolerance


def waiting_part(cycles: Sequence[Cycle]) -> float | None:
    """waiting / (waiting + running) over these cycles (PlexRL §7.2); None if there are none."""
    total_s = waited_s = 0.0
    for cycle in cycles:
        total_s += cycle.length_s
        waited_s += cycle.waited_s
    return waited_s / total_s if total_s > 0 else None


def measured_waiting_part(deployment: Deployment) -> float | None:
    """`waiting_part` of its last cycles, also after its end; None: there are none."""
    cycles = deployment.demand.cycles
    return waiting_part(cycles.measured) if cycles.measured else cycles.waiting_part


def _is_end(deployment: Deployment, cycle: OpenCycle, kind: OperationKind) -> bool:
    if kind == _PUBLISH:
        # The first publish ends a cycle in any case: a sync before the first step.
        is_end = cycle.has_step or not (
            deployment.demand.cycles.steps and deployment.demand.cycles.publishes
        )
        deployment.demand.cycles.divide_by_publish()
        return is_end
    if deployment.spec.kind == "rollout":
        # Only its next operation tells.
        return False
    if deployment.spec.kind == "forward":
        # It has no steps; it runs one `forward` in each step of its job.
        return kind == _FORWARD
    return kind == _OPTIM_STEP and not deployment.demand.cycles.publishes


def _merge(spans: Sequence[BusySpan], gap_s: float) -> list[BusySpan]:
    found: list[BusySpan] = []
    for span in sorted(spans, key=lambda each: each.offset_s):
        if found and span.offset_s - (found[-1].offset_s + found[-1].duration_s) <= gap_s:
            last = found[-1]
            end_s = max(last.offset_s + last.duration_s, span.offset_s + span.duration_s)
            found[-1] = BusySpan(
                offset_s=last.offset_s,
                duration_s=end_s - last.offset_s,
                overlapped=span.overlapped,
            )
        else:
            found.append(span)
    return found


def _with_slack(segments: list[Segment], period_s: float) -> tuple[Segment, ...]:
    """`slack_s` of 1 stands for *has some*: it is the time to the next segment."""
    found = []
    for index, segment in enumerate(segments):
        wraps = index + 1 == len(segments)
        next_s = segments[0].offset_s + period_s if wraps else segments[index + 1].offset_s
        slack_s = next_s - (segment.offset_s + segment.duration_s) if segment.slack_s else 0.0
        found.append(
            Segment(
                offset_s=segment.offset_s,
                duration_s=segment.duration_s,
                slack_s=max(0.0, slack_s),
            )
        )
    return tuple(found)
