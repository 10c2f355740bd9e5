"""Changes to a trace on its way into a simulation: faster arrivals, capped lengths, a backlog."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from plexrl.errors import InvalidRequestError
from plexrl.traces.schema import TraceJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What to change; as it stands, nothing."""

    compress: float = 1.0
    """Arrivals come so many times as fast."""
    backlog: bool = False
    """All jobs are there at the start, in their order."""
    cap_s: float | None = None
    """Longer jobs are cut to this."""
    gpus_min: int = 0
    """Smaller jobs are left out."""
    duration_s_min: float = 0.0
    """Shorter jobs are left out."""

    def __post_init__(self) -> None:
        if not 0 < self.compress < 1e6:
            raise InvalidRequestError(f"compress arrivals by more than 0, not {self.compress}")
        if self.cap_s is not None and not 0 < self.cap_s < 1e9:
            raise InvalidRequestError(f"cap durations at more than 0 s, not {self.cap_s}")
        if not self.duration_s_min < 1e9:
            raise InvalidRequestError(
                f"leave out jobs shorter than some seconds, not {self.duration_s_min}"
            )


def shaped(jobs: Iterable[TraceJob], shape: Shape) -> Iterator[TraceJob]:
    """The jobs, changed so, still in order of submission. The first that is kept comes at 0."""
    return changed(from_first(kept(jobs, shape)), shape)


def kept(jobs: Iterable[TraceJob], shape: Shape) -> Iterator[TraceJob]:
    """The jobs that the shape does not leave out."""
    return (
        job for job in jobs if job.gpus >= shape.gpus_min and job.service_s >= shape.duration_s_min
    )


def from_first(jobs: Iterable[TraceJob]) -> Iterator[TraceJob]:
    """The jobs by a clock that starts at the first of them: nobody waits or pays before it."""
    start_s: float | None = None
    for job in jobs:
        if start_s is None:
            start_s = job.submit_s
        # Sources count in milliseconds at best; the difference of two clocks' floats does not.
        yield replace(job, submit_s=round(job.submit_s - start_s, 6)) if start_s else job


def changed(jobs: Iterable[TraceJob], shape: Shape) -> Iterator[TraceJob]:
    """The jobs at their new times, none longer than the cap."""
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
