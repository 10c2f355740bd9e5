"""Draws the durations of a job's cycles from its trace row's profile and jitter.

Training work is proportional to the tokens of the rollout; a sync moves a constant number of bytes.
The factors of rollout and training work have mean 1. Without response lengths they are lognormal
and correlated through their normal scores. With response lengths, the longest response determines
the end of the rollout and the sum determines the training work
(`plexrl.sim.workload.response_lengths`). Tool stalls are added to either.

A cycle depends on (seed, job, number) alone, in any order of draws, so that policies can be
compared cycle by cycle. A distribution stores the profile and no draws. Pure, except for reading a
trace of response lengths.
"""

import math
from itertools import pairwise
from typing import NamedTuple, Protocol

from plexrl.sim.workload.counter_rng import lognormal, normals, stream, uniform
from plexrl.sim.workload.response_lengths import read_longest_of
from plexrl.sim.workload.scenario import Behaviour, Detail, ToolStalls
from plexrl.traces.schema import TOLERANCE_S, TraceJob, TraceSegment

TOKENS = 1_000_000
"""Tokens of a mean cycle."""

SYNC = "sync"
"""Function of the segments whose duration does not depend on the tokens."""

WHOLE = "run"
"""Function of the single segment of a job without segments: it needs its GPUs all the time."""

LANES = 4
"""Random numbers reserved for each cycle: for the two factors and for the stall."""


class DrawnCycle(NamedTuple):
    """One cycle, in seconds on the trace's nodes without waiting."""

    rollout_s: float
    """Idle time before the first and after the last busy segment."""
    segments_s: tuple[float, ...]
    """Durations of the busy segments, in order."""
    gaps_s: tuple[float, ...]
    """Idle times between the segments, one fewer."""
    tokens: int
    """Tokens of the rollout: the size of the training work."""

    @property
    def busy_s(self) -> float:
        """Seconds in which the cycle needs the training GPUs."""
        return math.fsum(self.segments_s)


class CycleSource(Protocol):
    """Provides the durations of a job's cycles."""

    functions: tuple[str, ...]
    """Functions of a cycle's segments."""

    def draw(self, number: int) -> DrawnCycle:
        """The job's `number`-th cycle, from 0; repeated calls return equal cycles."""
        ...


class CycleFactory(Protocol):
    """Creates the cycle source of a submitted job."""

    def __call__(
        self, job: TraceJob, behaviour: Behaviour, seed: int, *, detail: Detail
    ) -> CycleSource: ...


class CycleDistribution:
    """The distribution of a job's cycles."""

    __slots__ = (
        "_common",
        "_is_one",
        "_key",
        "_longest",
        "_own",
        "_parts",
        "_rollout_s",
        "_shift",
        "_sigma",
        "_stalls",
        "functions",
        "mean",
    )

    def __init__(
        self, job: TraceJob, behaviour: Behaviour, seed: int, *, detail: Detail = "operation"
    ) -> None:
        """`detail="burst"` merges adjacent segments.

        Raises:
            InvalidRequestError: the trace of response lengths cannot be read.
        """
        segments = _segments(job)
        period_s = job.period_s if job.period_s is not None else job.service_s
        gaps_s = tuple(
            max(0.0, after.offset_s - before.offset_s - before.duration_s)
            for before, after in pairwise(segments)
        )
        busy_s = math.fsum(segment.duration_s for segment in segments)
        self._rollout_s = max(0.0, period_s - busy_s - math.fsum(gaps_s))
        self.functions: tuple[str, ...]
        """Functions of the drawn segments; those of merged segments are joined by `+`."""
        self.functions, work_s, fixed_s, gaps_s = _merge(segments, gaps_s, detail)
        self.mean = DrawnCycle(
            self._rollout_s,
            tuple(map(sum, zip(work_s, fixed_s, strict=True))),
            gaps_s,
            TOKENS,
        )
        """The profile itself, without jitter."""
        self._parts = tuple(zip(work_s, fixed_s, strict=True))
        self._is_one = len(self._parts) == 1
        self._key = stream(seed, "cycles", job.job_id)
        self._stalls = behaviour.stalls if behaviour.stalls and behaviour.stalls.chance else None
        responses = behaviour.responses
        self._longest = read_longest_of(responses, behaviour.lengths) if responses else None
        self._common = behaviour.correlation
        self._own = math.sqrt(1.0 - behaviour.correlation**2)
        self._sigma = 0.0
        if self._longest is None:
            self._sigma = (
                behaviour.jitter
                if behaviour.jitter is not None
                else sigma_of(
                    job.jitter_s, self._rollout_s, math.fsum(work_s), behaviour.correlation
                )
            )
        self._shift = -self._sigma * self._sigma / 2.0

    def draw(self, number: int) -> DrawnCycle:
        """The job's `number`-th cycle."""
        at = number * LANES
        sigma = self._sigma
        if sigma:
            common, own = normals(self._key, at)
            work = math.exp(sigma * common + self._shift)
            rollout = math.exp(sigma * (self._common * common + self._own * own) + self._shift)
        elif self._longest is not None:
            part = uniform(self._key, at)
            rollout, work = self._longest.draw(part, normals(self._key, at + 1)[0])
        elif self._stalls is None:
            return self.mean
        else:
            rollout = work = 1.0
        rollout_s = rollout * self._rollout_s
        if self._stalls is not None and uniform(self._key, at + 2) < self._stalls.chance:
            rollout_s += _stall_s(self._stalls, normals(self._key, at + 3)[0])
        if self._is_one:
            work_s, fixed_s = self._parts[0]
            lengths_s: tuple[float, ...] = (work * work_s + fixed_s,)
        else:
            lengths_s = tuple(work * work_s + fixed_s for work_s, fixed_s in self._parts)
        tokens = round(TOKENS * work)
        return DrawnCycle(rollout_s, lengths_s, self.mean.gaps_s, tokens if tokens > 1 else 1)


def sigma_of(jitter_s: float, rollout_s: float, work_s: float, correlation: float) -> float:
    """The sigma with which rollout_s and work_s, each times a lognormal factor of mean 1 whose
    normal scores have this correlation, have a sum with standard deviation `jitter_s`."""
    own, shared = rollout_s**2 + work_s**2, 2.0 * rollout_s * work_s
    if jitter_s <= 0.0 or own <= 0.0:
        return 0.0
    # The variance is convex and increasing in sigma squared: Newton's method from above converges.
    square = math.log1p((jitter_s**2 + shared) / own)
    for _ in range(100):
        over = own * math.expm1(square) + shared * math.expm1(correlation * square) - jitter_s**2
        slope = own * math.exp(square) + shared * correlation * math.exp(correlation * square)
        step = over / slope
        square -= step
        if step <= 1e-13 * square:
            break
    return math.sqrt(max(0.0, square))


def _segments(job: TraceJob) -> tuple[TraceSegment, ...]:
    if job.segments:
        return job.segments
    whole_s = job.period_s if job.period_s is not None else job.service_s
    return (TraceSegment(function=WHOLE, offset_s=0.0, duration_s=whole_s),)


def _merge(
    segments: tuple[TraceSegment, ...], gaps_s: tuple[float, ...], detail: Detail
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Functions, seconds proportional to tokens, constant seconds, and the gaps between."""
    functions: list[str] = []
    work_s: list[float] = []
    fixed_s: list[float] = []
    kept_s: list[float] = []
    for segment, gap_s in zip(segments, (math.inf, *gaps_s), strict=True):
        is_sync = segment.function == SYNC
        work = 0.0 if is_sync else segment.duration_s
        fixed = segment.duration_s if is_sync else 0.0
        if detail == "burst" and gap_s <= MERGED_GAP_S:
            functions[-1] += f"+{segment.function}"
            work_s[-1] += work
            fixed_s[-1] += fixed
            continue
        if functions:
            kept_s.append(gap_s)
        functions.append(segment.function)
        work_s.append(work)
        fixed_s.append(fixed)
    return tuple(functions), tuple(work_s), tuple(fixed_s), tuple(kept_s)


MERGED_GAP_S = 0.01 + TOLERANCE_S
"""Segments with at most this gap are adjacent: offsets in traces are rounded, some to a hundredth
of a second."""


def _stall_s(stalls: ToolStalls, normal: float) -> float:
    return stalls.mean_s * lognormal(stalls.sigma, normal)
