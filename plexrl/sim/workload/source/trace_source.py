"""Job sources of scenarios: a trace or the generator. Picklable and repeatable."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from plexrl.errors import InvalidRequestError
from plexrl.traces import (
    Shape,
    TraceJob,
    generate_jobs,
    open_trace,
    published_workload,
    shaped,
    with_profiles,
)
from plexrl.traces.bundled import PREFIX
from plexrl.traces.convert.shaping import changed, kept
from plexrl.traces.formats.sorting import from_first
from plexrl.traces.generate.workload import CAP_S
from plexrl.traces.io.problems import Report

DAY_S = 86_400.0
JOBS_MAX = 10_000_000
"""Most generated jobs; more would take days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """Jobs of a trace, with the same changes as in `plexrl traces convert`."""

    trace: str
    """A path, or `bundled:NAME`."""
    layout: str | None = None
    """Column layout; absent: detected from the header."""
    skip_bad: bool = False
    """Skip bad rows; otherwise the jobs end in an error that lists all of them."""
    shape: Shape = field(default_factory=Shape)
    gpus_max: int | None = None
    """Larger jobs are excluded."""
    any_node_type: bool = False
    """Ignore the node types that jobs request."""
    span_s: float | None = None
    """Include only jobs submitted within so many seconds of the first included job, before
    compression."""
    profiles: bool = True
    """Give jobs without cycles those of the published RL profiles."""
    seed: int = 0
    """Seed of the profiles."""

    @classmethod
    def at(cls, trace: str) -> "TraceSource":
        """A trace by absolute path, so that any process can read it."""
        return cls(trace=trace if trace.startswith(PREFIX) else str(Path(trace).absolute()))

    def jobs(self) -> Iterator[TraceJob]:
        """The jobs in order of submission; the clock starts at the first included job.

        Raises:
            TraceError: rows are bad and not skipped. For a public trace this is raised at the end
                only; `surveyed` reads up to it.
            InvalidRequestError: the trace cannot be read or contains no jobs.
        """
        return self.read(None)

    def read(self, on_problem: Report | None) -> Iterator[TraceJob]:
        """`jobs`, with every bad row reported to `on_problem`."""
        source = open_trace(
            self.trace, format=self.layout, skip_bad=self.skip_bad, on_problem=on_problem
        )
        if source.table.name != "jobs":
            raise InvalidRequestError(
                f"{self.trace} contains response lengths, not jobs: use it as --lengths together "
                "with a trace of jobs"
            )
        rows = _up_to(source.rows, self.gpus_max)
        jobs = changed(_within(from_first(kept(rows, self.shape)), self.span_s), self.shape)
        if self.any_node_type:
            jobs = (replace(job, node_type="") for job in jobs)
        return with_profiles(jobs, seed=self.seed) if self.profiles else jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSource:
    """Generated jobs of the published profile: 7B, 30B and 235B in equal numbers."""

    span_s: float
    """Time span of the arrivals."""
    jobs_per_day: float = 12.0
    shape: Shape = field(default_factory=Shape)
    gpus_max: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = self.jobs_per_day * self.span_s / DAY_S
        if not 0.0 < wanted <= JOBS_MAX:
            raise InvalidRequestError(
                f"{self.span_s / DAY_S:g} days with {self.jobs_per_day:g} jobs a day would be "
                f"{wanted:g} jobs: more than 0 and at most {JOBS_MAX} can be generated; change "
                "--days or --jobs-per-day"
            )

    def jobs(self) -> Iterator[TraceJob]:
        """The jobs in order of submission."""
        made = generate_jobs(
            published_workload(self.jobs_per_day),
            seed=self.seed,
            span_s=self.span_s,
            cap_s=CAP_S if self.shape.cap_s is None else self.shape.cap_s,
        )
        return shaped(_up_to(made, self.gpus_max), self.shape)

    def read(self, on_problem: Report | None) -> Iterator[TraceJob]:
        """`jobs`; generated rows are never bad."""
        del on_problem
        return self.jobs()


def _within(jobs: Iterable[TraceJob], span_s: float | None) -> Iterator[TraceJob]:
    for job in jobs:
        if span_s is not None and job.submit_s > span_s:
            return
        yield job


def _up_to(jobs: Iterable[TraceJob], gpus_max: int | None) -> Iterator[TraceJob]:
    if gpus_max is None:
        return iter(jobs)
    return (job for job in jobs if job.gpus <= gpus_max)
