"""Converts a live cluster's jobs and operation log into trace rows. Pure.

Waiting for the group is subtracted from a job's clock, as in the scheduler's profiler, so that a
row describes the job without other jobs. The log keeps the newest operations only; if a job's first
operations are gone, the row covers the rest.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from plexrl.traces.convert.cycles import split_cycles
from plexrl.traces.convert.history import (
    PastJob,
    PastOperation,
    PastRun,
    by_deployment,
    runs_of,
)
from plexrl.traces.schema import OUTCOMES, SEGMENTS_MAX, TraceJob, TraceSegment
from plexrl.wire.operations import MOVES

FUNCTIONS = {
    "forward": "log_prob",
    "forward_backward": "update",
    "optim_step": "update",
    "publish": "sync",
}
"""The paper's names of operation kinds; other kinds keep their own names."""

MERGE_PART = 0.02
"""Spans of one function are merged if their gap is at most this part of the period."""
WARM_UP_CYCLES = 1
ASYNCHRONOUS_PART = 0.1
"""Minimum overlap of rollouts and training, as a part of the training time, for a job to count as
one step asynchronous."""
MAD_TO_DEVIATION = 1.4826


@dataclass(slots=True, kw_only=True)
class _Span:
    function: str
    begin_s: float
    """On the job's own clock, without waiting."""
    end_s: float


@dataclass(slots=True, kw_only=True)
class _Cycle:
    length_s: float
    spans: list[_Span]


def record(
    jobs: Iterable[PastJob], operations: Iterable[PastOperation], now: float
) -> list[TraceJob]:
    """A trace row for each job that ran, ordered by submission; the first submission is at 0.

    `now` is the cluster's clock: the end of jobs that still run.
    """
    runs: dict[str, list[PastRun]] = {}
    for deployment, own in by_deployment(operations).items():
        if work := [run for run in runs_of(own) if run.kind not in MOVES]:
            runs[deployment] = work
    rows = [_row(job, runs, now) for job in jobs]
    ran = sorted((row for row in rows if row), key=lambda row: (row.submit_s, row.job_id))
    start_s = ran[0].submit_s if ran else 0.0
    return [replace(job, submit_s=job.submit_s - start_s) for job in ran]


def _row(job: PastJob, runs: Mapping[str, Sequence[PastRun]], now: float) -> TraceJob | None:
    deployments = [deployment for deployment in job.deployments if deployment.deployment in runs]
    if not deployments:
        return None
    training = [deployment for deployment in deployments if deployment.kind != "rollout"]
    rollouts = [deployment for deployment in deployments if deployment.kind == "rollout"]
    first_s = min(runs[deployment.deployment][0].started_at for deployment in deployments)
    end_s = job.ended_at if job.ended_at is not None else now
    demand: dict[str, Any] = {}
    waited_s = 0.0
    if training:
        names = [deployment.deployment for deployment in training]
        main = runs[max(names, key=lambda name: (_busy_s(runs[name]), name))]
        cycles, count, waited_s = _cycles(main)
        demand = _demand(cycles, count)
        ahead = [run for rollout in rollouts for run in runs[rollout.deployment]]
        if demand and _overlap_s(main, ahead) > ASYNCHRONOUS_PART * _busy_s(main):
            demand["staleness"] = 1
    return TraceJob(
        job_id=job.job,
        tenant=job.tenant,
        submit_s=job.submitted_at,
        # The job ran, so its duration is not 0, even below the clock's resolution.
        duration_s=max(1e-6, end_s - first_s - waited_s),
        gpus=sum(deployment.workers for deployment in training),
        rollout_gpus=sum(rollout.workers for rollout in rollouts),
        state_bytes=sum(deployment.state_bytes for deployment in training),
        priority=job.priority,
        wait_s=max(0.0, first_s - job.submitted_at),
        outcome=job.state.lower() if job.state.lower() in OUTCOMES else "",
        **demand,
    )


def _busy_s(runs: Iterable[PastRun]) -> float:
    return sum((run.took_s for run in runs), 0.0)


def _cycles(runs: Sequence[PastRun]) -> tuple[list[_Cycle], int, float]:
    """The cycles of known length, the number of whole cycles (the length of the last one is unknown
    unless another begins), and the total wait for the group."""
    whole, rest = split_cycles(runs)
    begun: list[tuple[float, list[_Span]]] = []
    waited_s = 0.0
    free_s = runs[0].submitted_at
    for group in (*whole, rest) if rest else whole:
        began_s = max(group[0].submitted_at, free_s) - waited_s
        spans: list[_Span] = []
        for run in group:
            waited_s += max(0.0, run.started_at - max(run.submitted_at, free_s))
            begin_s = run.started_at - waited_s - began_s
            function = FUNCTIONS.get(run.kind, run.kind)
            spans.append(_Span(function=function, begin_s=begin_s, end_s=begin_s + run.took_s))
            free_s = max(free_s, run.finished_at)
        begun.append((began_s, spans))
    cycles = [
        _Cycle(length_s=after_s - began_s, spans=spans)
        for (began_s, spans), (after_s, _) in pairwise(begun)
    ]
    return cycles, len(whole), waited_s


def _demand(cycles: Sequence[_Cycle], count: int) -> dict[str, Any]:
    """The cycle fields of a `TraceJob`: medians over the cycles with the usual functions."""
    if not cycles:
        return {}
    clean = cycles[WARM_UP_CYCLES:] or cycles
    period_s = median(cycle.length_s for cycle in clean)
    if period_s < 1e-3:
        return {}
    merged = [_merge(cycle.spans, MERGE_PART * period_s) for cycle in clean]
    orders = Counter(tuple(span.function for span in spans) for spans in merged)
    usual = min(orders, key=lambda order: (-orders[order], order))
    agreeing = [spans for spans in merged if tuple(span.function for span in spans) == usual]
    segments: list[TraceSegment] = []
    end_s = 0.0
    for index, function in enumerate(usual[:SEGMENTS_MAX]):
        begin_s = max(end_s, median(spans[index].begin_s for spans in agreeing))
        length_s = median(spans[index].end_s - spans[index].begin_s for spans in agreeing)
        length_s = min(length_s, period_s - begin_s)
        if length_s > 0:
            segments.append(TraceSegment(function=function, offset_s=begin_s, duration_s=length_s))
            end_s = begin_s + length_s
    spread_s = median(abs(cycle.length_s - period_s) for cycle in clean)
    return {
        "cycles": count,
        "period_s": period_s,
        "jitter_s": MAD_TO_DEVIATION * spread_s,
        "segments": tuple(segments),
    }


def _merge(spans: Sequence[_Span], gap_s: float) -> list[_Span]:
    found: list[_Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last and last.function == span.function and span.begin_s - last.end_s <= gap_s:
            found[-1] = _Span(
                function=last.function,
                begin_s=last.begin_s,
                end_s=max(last.end_s, span.end_s),
            )
        else:
            found.append(span)
    return found


def _overlap_s(runs: Sequence[PastRun], others: Iterable[PastRun]) -> float:
    """Seconds that `runs` share with the union of `others`."""
    union: list[tuple[float, float]] = []
    for other in sorted(others, key=lambda run: run.started_at):
        if union and other.started_at <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], other.finished_at)
        else:
            union.append((other.started_at, other.finished_at))
    total_s, at = 0.0, 0
    for run in runs:
        while at < len(union) and union[at][1] <= run.started_at:
            at += 1
        for begin_s, end_s in union[at:]:
            if begin_s >= run.finished_at:
                break
            total_s += min(end_s, run.finished_at) - max(begin_s, run.started_at)
    return total_s
