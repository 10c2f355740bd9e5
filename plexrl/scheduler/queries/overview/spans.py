"""Spans and bands: runs merged for a screen of a few hundred pixels.

Runs shorter than a pixel are merged, so an answer has a bounded size at any rate of operations.
"""

from collections.abc import Callable, Iterable, Sequence

from plexrl.scheduler.queries.overview.runs import RunJob
from plexrl.wire.messages.overview_views import BAND_CELLS, SEVERAL_JOBS, WORK, BandView, Span

Run = tuple[float, float, RunJob | None, int]
"""Start and end in seconds after the window's begin, the job (None: several), and the kind."""


class LaneBand:
    """Busy GPUs of neighbouring groups, by cell."""

    def __init__(self, first: int, cell_s: float) -> None:
        self._first, self._cell_s = first, cell_s
        self._groups = self._gpus = 0
        self.busy = [0.0] * BAND_CELLS
        """Busy GPUs of each cell."""

    def enter(self, gpus: int) -> None:
        """Add a group."""
        self._groups += 1
        self._gpus += gpus

    def add(self, runs: Sequence[Run], gpus: int, covered: float) -> float:
        """Add the next runs of a group, in order, of which those before end at `covered`; returns
        the latest end."""
        for begin, end in union(runs):
            if end > covered:
                self._fill(max(begin, covered) / self._cell_s, end / self._cell_s, gpus)
                covered = end
        return covered

    def view(self) -> BandView:
        """The band, a digit for each cell."""
        digits = [str(min(9, int(10 * part / self._gpus))) for part in self.busy]
        return {"first": self._first, "groups": self._groups, "busy": "".join(digits)}

    def _fill(self, begin: float, end: float, gpus: int) -> None:
        """Add the part of each cell between `begin` and `end`, in cells."""
        for at in range(int(begin), min(BAND_CELLS, int(end) + 1)):
            part = min(end, at + 1.0) - max(begin, float(at))
            self.busy[at] += max(0.0, part) * gpus


def merge(
    runs: Iterable[Run],
    least_s: float,
    number: Callable[[RunJob | None], int],
    spans: list[Span],
) -> None:
    """Add runs, in order of their begins, to `spans`, of which about window / `least_s` are left.
    `number`: the index of a job; `SEVERAL_JOBS` for None.

    Runs of one job that are less than `least_s` apart become one. What is shorter than `least_s`
    joins the short span before it: then it is of `SEVERAL_JOBS` if they differ.
    """
    for begin, end, job, kind in runs:
        own = number(job)
        if spans:
            last_begin, last_end, last_job, last_kind = spans[-1]
            is_near = begin - last_end < least_s
            is_same = last_job == own and last_kind == kind
            are_short = end - begin < least_s and last_end - last_begin < least_s
            if is_near and (is_same or are_short):
                mixed = own if last_job == own else SEVERAL_JOBS
                merged = last_kind if last_kind == kind else WORK
                spans[-1] = (last_begin, round(max(end, last_end), 3), mixed, merged)
                continue
        spans.append((round(begin, 3), round(end, 3), own, kind))


def union(runs: Iterable[Run]) -> list[tuple[float, float]]:
    """The times in which at least one of the runs used the GPUs, which are in order of their
    begins."""
    found: list[tuple[float, float]] = []
    for begin, end, _, _ in runs:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def uncovered(
    covered: Iterable[tuple[float, float]], since: float, until: float
) -> list[tuple[float, float]]:
    """The parts of a window that no interval covers, in seconds after `since`."""
    gaps: list[tuple[float, float]] = []
    at = since
    for begin, end in sorted(covered):
        if begin > at:
            gaps.append((at - since, min(begin, until) - since))
        at = max(at, end)
        if at >= until:
            return gaps
    return [*gaps, (at - since, until - since)]
