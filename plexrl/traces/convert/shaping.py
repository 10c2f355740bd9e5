"""Changes a trace before a simulation: faster arrivals, capped durations, a backlog."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from plexrl.errors import InvalidRequestError
from plexrl.traces.formats.sorting import from_first
from plexrl.traces.schema import TraceJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The changes; by default none."""

    compress: float = 1.0
    """Factor by which arrivals are faster."""
    backlog: bool = False
    """Submit all jobs at the start, in their order."""
    cap_s: float | None = None
    """Cap on a job's duration."""
    gpus_min: int = 0
    """Exclude smaller jobs."""
    duration_s_min: float = 0.0
    """Exclude shorter jobs."""
    start_s: float = 0.0
    """Exclude jobs submitted sooner than so many seconds after the first job of those sizes and
    durations."""

    def __post_init__(self) -> None:
        if not 0 < self.compress < 1e6:
            raise InvalidRequestError(f"compress arrivals by a factor above 0, not {self.compress}")
        if self.cap_s is not None and not 0 < self.cap_s < 1e9:
            raise InvalidRequestError(f"cap durations at more than 0 s, not {self.cap_s}")
        if not self.duration_s_min < 1e9:
            raise InvalidRequestError(
                f"a minimum duration is below 1e9 s, not {self.duration_s_min}"
            )
        if not 0 <= self.start_s < 1e9:
            raise InvalidRequestError(f"start a window at 0 s to 1e9 s, not {self.start_s}")


def shaped(jobs: Iterable[TraceJob], shape: Shape) -> Iterator[TraceJob]:
    """The changed jobs in order of submission; the first included job is submitted at 0."""
    return changed(from_first(kept(jobs, shape)), shape)


def kept(jobs: Iterable[TraceJob], shape: Shape) -> Iterator[TraceJob]:
    """The jobs that the shape includes."""
    large = (
        job for job in jobs if job.gpus >= shape.gpus_min and job.service_s >= shape.duration_s_min
    )
    if not shape.start_s:
        return large
    return (job for job in from_first(large) if job.submit_s >= shape.start_s)


def changed(jobs: Iterable[TraceJob], shape: Shape) -> Iterator[TraceJob]:
    """The jobs with changed submission times and capped durations."""
    for job in jobs:
        submit_s = 0.0 if shape.backlog else job.submit_s / shape.compress
        job = replace(job, submit_s=submit_s)
        yield job if shape.cap_s is None else _capped(job, shape.cap_s)


def _capped(job: TraceJob, cap_s: float) -> TraceJob:
    length_s = job.service_s
    if length_s <= cap_s:
        return job
    cycles = job.cycles and max(1, int(job.cycles * cap_s / length_s))
    return replace(job, duration_s=cap_s, cycles=cycles)
