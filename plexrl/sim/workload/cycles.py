"""What each cycle of a job takes: its trace row's profile, and how cycles scatter round it.

The training work of a cycle goes with the tokens that its rollout drew; a sync moves the same bytes
whatever was rolled out. Both factors have mean 1. Without response lengths they are lognormal and
correlated through their normal scores; with them the longest response decides when a rollout ends,
and the sum of all what there is to train on (`plexrl.sim.workload.response_lengths`). Stalls of
tools come on top of either.

A cycle follows from (seed, job, number) alone, in whatever order cycles are asked for, so that
policies can be compared cycle by cycle. A law holds the profile and nothing of its draws. Pure, but
for reading a trace of response lengths.
"""

import math
from itertools import pairwise
from typing import NamedTuple, Protocol

from plexrl.sim.workload.counter_rng import lognormal, normals, stream, uniform
from plexrl.sim.workload.response_lengths import read_longest_of
from plexrl.sim.workload.scenario import Behaviour, Detail, ToolStalls
from plexrl.traces.schema import TOLERANCE_S, TraceJob, TraceSegment

TOKENS = 1_000_000
"""Of a mean cycle."""

SYNC = "sync"
"""Function of the segments whose length does not go with the tokens."""

WHOLE = "run"
"""Function of the one segment of a job that has none: it needs its GPUs all the time."""

LANES = 4
"""Random numbers that a cycle may use: for the two factors, and for its stall."""


class DrawnCycle(NamedTuple):
    """One cycle, in seconds on nodes of the trace and without waiting."""

    rollout_s: float
    """From the start to the first busy segment, and from the last to the end."""
    segments_s: tuple[float, ...]
    """Lengths of the busy segments, in order."""
    gaps_s: tuple[float, ...]
    """Idle between them, one fewer."""
    tokens: int
    """Drawn by the rollout: the size of the training work."""

    @property
    def busy_s(self) -> float:
        """In which it needs the training GPUs."""
        return math.fsum(self.segments_s)


class Cycles(Protocol):
    """Says what each cycle of a job takes."""

    functions: tuple[str, ...]
    """Of a cycle's segments."""

    def draw(self, number: int) -> DrawnCycle:
        """The job's `number`-th cycle, from 0: whenever it is asked for, the same."""
        ...


class Laws(Protocol):
    """Makes what says it, for a job that is submitted."""

    def __call__(
        self, job: TraceJob, behaviour: Behaviour, seed: int, *, detail: Detail
    ) -> Cycles: ...


class CycleLaw:
    """Draws a job's cycles."""

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
        """With `detail="burst"` segments that touch are one.

        Raises:
            InvalidRequestError: the trace of response lengths cannot be read.
        """
        segments = _segments(job)
        period_s = job.period_s if job.period_s is not None else job.service_s
        gaps_s = tuple(
            max(0.0, after.offset_s - before.offset_s - before.duration_s)
            for before, after in pairwise(segments)
        )
        busy_s = math.fsum(each.duration_s for each in segments)
        self._rollout_s = max(0.0, period_s - busy_s - math.fsum(gaps_s))
        self.functions: tuple[str, ...]
        """Of the segments that are drawn; of those that were made one, joined by `+`."""
        self.functions, work_s, fixed_s, gaps_s = _merged(segments, gaps_s, detail)
        self.mean = DrawnCycle(
            self._rollout_s,
            tuple(map(sum, zip(work_s, fixed_s, strict=True))),
            gaps_s,
            TOKENS,
        )
        """Without any scatter: the profile itself."""
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
    """Sigma of two lognormal factors of mean 1, whose normal scores have this correlation, with
    which rollout_s and work_s, each times its factor, have a sum of this standard deviation."""
    own, shared = rollout_s**2 + work_s**2, 2.0 * rollout_s * work_s
    if jitter_s <= 0.0 or own <= 0.0:
        return 0.0
    # The sum's variance is convex and rises in sigma squared: Newton's steps from above only fall.
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


def _merged(
    segments: tuple[TraceSegment, ...], gaps_s: tuple[float, ...], detail: Detail
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Functions, seconds that go with the tokens, seconds that do not, and the gaps between."""
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
"""Segments that are this near each other touch: offsets in traces are rounded, some to a hundredth
of a second."""


def _stall_s(stalls: ToolStalls, normal: float) -> float:
    return stalls.mean_s * lognormal(stalls.sigma, normal)
