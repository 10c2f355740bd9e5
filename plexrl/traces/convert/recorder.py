"""Converts a live cluster's jobs and operation log into trace rows. Pure.

Waiting for the group is subtracted from a job's clock, as in the scheduler's profiler, so that a
row describes the job without other jobs. The log keeps the newest operations only; if a job's first
operations are gone, the row covers the rest.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from plexrl.traces.convert.cycles import Row, split_cycles
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


@dataclass(slots=True)
class _Runs:
    """The runs of one deployment, ordered by start."""

    rows: list[Row] = field(default_factory=list)

    @property
    def busy_s(self) -> float:
        return sum((row["finished_at"] - row["started_at"] for row in self.rows), 0.0)


def record(jobs: Iterable[Row], operations: Iterable[Row], now: float) -> list[TraceJob]:
    """A trace row for each job that ran, ordered by submission; the first submission is at 0.

    `jobs` are rows of `/v1/jobs`, `operations` rows of `/v1/operations`. `now` is the cluster's
    clock (`/v1/status`): the end of jobs that still run.
    """
    runs: dict[str, _Runs] = {}
    for row in operations:
        if row["started_at"] is not None and row["kind"] not in MOVES:
            runs.setdefault(row["deployment"], _Runs()).rows.append(row)
    for run in runs.values():
        run.rows.sort(key=lambda row: (row["started_at"], row["index"]))
    found = [_row(job, runs, now) for job in jobs]
    ran = sorted((job for job in found if job), key=lambda job: (job.submit_s, job.job_id))
    start_s = ran[0].submit_s if ran else 0.0
    return [replace(job, submit_s=job.submit_s - start_s) for job in ran]


def _row(job: Row, runs: Mapping[str, _Runs], now: float) -> TraceJob | None:
    deployments = [each for each in job["deployments"] if each["deployment"] in runs]
    if not deployments:
        return None
    training = [deployment for deployment in deployments if deployment["kind"] != "rollout"]
    rollouts = [deployment for deployment in deployments if deployment["kind"] == "rollout"]
    first_s = min(
        runs[deployment["deployment"]].rows[0]["started_at"] for deployment in deployments
    )
    end_s = job["ended_at"] if job["ended_at"] is not None else now
    demand: dict[str, Any] = {}
    waited_s = 0.0
    if training:
        main = max(training, key=lambda each: (runs[each["deployment"]].busy_s, each["deployment"]))
        rows = runs[main["deployment"]].rows
        cycles, count, waited_s = _cycles(rows)
        demand = _demand(cycles, count)
        ahead = [row for rollout in rollouts for row in runs[rollout["deployment"]].rows]
        if demand and _overlap_s(rows, ahead) > ASYNCHRONOUS_PART * runs[main["deployment"]].busy_s:
            demand["staleness"] = 1
    return TraceJob(
        job_id=job["job"],
        tenant=job["tenant"],
        submit_s=job["submitted_at"],
        # The job ran, so its duration is not 0, even below the clock's resolution.
        duration_s=max(1e-6, end_s - first_s - waited_s),
        gpus=sum(each["workers"] for each in training),
        rollout_gpus=sum(rollout["workers"] for rollout in rollouts),
        state_bytes=sum(each["state_bytes"] for each in training),
        priority=job["priority"],
        wait_s=max(0.0, first_s - job["submitted_at"]),
        outcome=job["state"].lower() if job["state"].lower() in OUTCOMES else "",
        **demand,
    )


def _cycles(rows: Sequence[Row]) -> tuple[list[_Cycle], int, float]:
    """The cycles of known length, the number of whole cycles (the length of the last one is unknown
    unless another begins), and the total wait for the group."""
    whole, rest = split_cycles(rows)
    found: list[tuple[float, list[_Span]]] = []
    waited_s = 0.0
    free_s = rows[0]["submitted_at"]
    for group in (*whole, rest) if rest else whole:
        began_s = max(group[0]["submitted_at"], free_s) - waited_s
        spans: list[_Span] = []
        for row in group:
            waited_s += max(0.0, row["started_at"] - max(row["submitted_at"], free_s))
            begin_s = row["started_at"] - waited_s - began_s
            length_s = row["finished_at"] - row["started_at"]
            function = FUNCTIONS.get(row["kind"]) or str(row["kind"])
            spans.append(_Span(function=function, begin_s=begin_s, end_s=begin_s + length_s))
            free_s = max(free_s, row["finished_at"])
        found.append((began_s, spans))
    cycles = [
        _Cycle(length_s=after_s - began_s, spans=spans)
        for (began_s, spans), (after_s, _) in pairwise(found)
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


def _overlap_s(rows: Sequence[Row], others: Sequence[Row]) -> float:
    """Seconds that runs of `rows` share with the union of `others`' runs."""
    union: list[tuple[float, float]] = []
    for row in sorted(others, key=lambda row: float(row["started_at"])):
        if union and row["started_at"] <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], row["finished_at"])
        else:
            union.append((row["started_at"], row["finished_at"]))
    total_s, at = 0.0, 0
    for row in rows:
        while at < len(union) and union[at][1] <= row["started_at"]:
            at += 1
        for begin_s, end_s in union[at:]:
            if begin_s >= row["finished_at"]:
                break
            total_s += min(end_s, row["finished_at"]) - max(begin_s, row["started_at"])
    return total_s
