"""What a simulated run cost each job: waits and slowdowns, cycle by cycle."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleRecord:
    """One cycle as it went."""

    began_at: float
    cycle_s: float
    alone_s: float
    """Of the same drawn cycle on a group that the job has to itself."""
    group_s: float
    """The part of it that ran on the group."""

    @property
    def wait_s(self) -> float:
        """Seconds lost to other jobs and to switches."""
        return self.cycle_s - self.alone_s

    @property
    def slowdown(self) -> float:
        """0 for a cycle that lost nothing."""
        return self.cycle_s / self.alone_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One job's cycles, oldest first."""

    job: str
    cycles: tuple[CycleRecord, ...]
    profiled: tuple[float, ...] = ()
    """The core's own measurement of the waiting part, read from time to time."""

    @property
    def waiting_part(self) -> float:
        """waiting / (waiting + running), where running is the cycle had it not to wait: as the
        core's profiler counts it."""
        total_s = sum(cycle.cycle_s for cycle in self.cycles)
        return sum(cycle.wait_s for cycle in self.cycles) / total_s if total_s > 0 else 0.0

    @property
    def duty_wait(self) -> float:
        """waiting / (waiting + running), where running is the job's work on the group."""
        waiting = sum(cycle.wait_s for cycle in self.cycles)
        running = sum(cycle.group_s for cycle in self.cycles)
        return waiting / (waiting + running) if waiting + running > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A whole run."""

    jobs: tuple[JobReport, ...]
    switches: int
    ended_at: float

    @property
    def slowdowns(self) -> list[float]:
        """Of all jobs' cycles."""
        return [cycle.slowdown for job in self.jobs for cycle in job.cycles]

    @property
    def summary(self) -> "Summary":
        """Over all jobs' cycles."""
        return summarise(self.slowdowns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of a set of slowdowns."""

    mean: float
    median: float
    p95: float


def summarise(slowdowns: Iterable[float]) -> Summary:
    """Mean, median and 95th percentile (nearest rank)."""
    ordered = sorted(slowdowns)
    return Summary(
        mean=fmean(ordered),
        median=median(ordered),
        p95=ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
    )
