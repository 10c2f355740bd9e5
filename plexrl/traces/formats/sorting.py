"""Sorts a trace of any length by submission, in bounded memory."""

import heapq
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from plexrl.traces.schema import TraceJob

IN_MEMORY = 100_000
"""Jobs in memory; longer traces are sorted in files and merged."""


def by_submission(jobs: Iterable[TraceJob], in_memory: int = IN_MEMORY) -> Iterator[TraceJob]:
    """The jobs by `submit_s`, the first at 0; the sort is stable."""
    return from_first(_sort(jobs, in_memory))


def from_first(jobs: Iterable[TraceJob]) -> Iterator[TraceJob]:
    """The jobs on a clock that starts at the first submission."""
    start_s: float | None = None
    for job in jobs:
        if start_s is None:
            start_s = job.submit_s
        # Sources have milliseconds at best; rounding removes float noise of the difference.
        yield replace(job, submit_s=round(job.submit_s - start_s, 6)) if start_s else job


def _sort(jobs: Iterable[TraceJob], in_memory: int) -> Iterator[TraceJob]:
    key = attrgetter("submit_s")
    with tempfile.TemporaryDirectory(prefix="plexrl-sort-") as folder:
        runs: list[Path] = []
        held: list[TraceJob] = []
        for job in jobs:
            held.append(job)
            if len(held) == in_memory:
                held.sort(key=key)
                runs.append(_write(Path(folder) / str(len(runs)), held))
                held = []
        held.sort(key=key)
        # The merge is stable, and its inputs are in reading order.
        yield from heapq.merge(*(_read(run) for run in runs), held, key=key)


def _write(path: Path, jobs: list[TraceJob]) -> Path:
    with path.open("wb") as file:
        for job in jobs:
            pickle.dump(job, file)
    return path


def _read(path: Path) -> Iterator[TraceJob]:
    with path.open("rb") as file:
        while True:
            try:
                job = pickle.load(file)
            except EOFError:
                return
            yield job
