"""The fidelity of a history in the types of its JSON form."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from plexrl.sim.fidelity.errors import Errors, errors_of, p95_of
from plexrl.sim.fidelity.forecast import skill_of
from plexrl.sim.fidelity.history import GroupFidelity, HistoryFidelity, LeftOut
from plexrl.sim.fidelity.run_forecast import RunForecast


@dataclass(frozen=True, slots=True)
class CycleQuantiles:
    """Quantiles of the durations of a job's cycles, in seconds."""

    median: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCycles:
    """Measured and predicted cycles of a job."""

    job: str
    cycles: int
    measured_s: CycleQuantiles
    predicted_s: CycleQuantiles
    error: Errors
    law_s: float | None
    """Predicted from drawn cycles; None: no prediction."""
    alone_s: float
    """Median if the job never waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCycles:
    """Measured and predicted cycles of the jobs of one group."""

    group: str
    cycles: int
    error: Errors
    alone_error: Errors
    """If no job waited."""
    jobs: list[JobCycles]


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityDocument:
    """The document that `plexrl fidelity` prints for a replay."""

    policy: str
    groups: list[GroupCycles]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMeans:
    """Mean cycles of a job, in seconds: as `JobForecast`, and what was measured."""

    job: str
    mean_s: float
    p95_s: float
    fifo_s: float
    alone_s: float
    cycles: int
    measured_mean_s: float
    measured_p95_s: float
    error: float
    """Relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionDocument:
    """The document that `plexrl fidelity --from` prints for a prediction."""

    policy: str
    jobs: list[JobMeans]
    error: Errors
    fifo_error: Errors
    alone_error: Errors
    skill: float
    skill_over_fifo: float
    left_out: tuple[LeftOut, ...]


def fidelity_values(fidelity: HistoryFidelity, policy: str) -> FidelityDocument:
    """Measured and predicted cycles of every job, and the errors, under the simulated `policy`."""
    return FidelityDocument(
        policy=policy,
        groups=[
            GroupCycles(
                group=group.group,
                cycles=len(group.recorded.cycles),
                error=group.recorded.errors,
                alone_error=group.recorded.alone_errors,
                jobs=[_job(group, job.job) for job in group.recorded.jobs],
            )
            for group in fidelity.groups
        ],
        left_out=fidelity.left_out,
    )


def run_forecast_values(forecast: RunForecast, policy: str) -> PredictionDocument:
    """Measured and predicted mean cycles of every job, and the errors and the skill."""
    skill = skill_of(forecast.jobs)
    return PredictionDocument(
        policy=policy,
        jobs=[
            JobMeans(
                **asdict(job.forecast),
                cycles=job.cycles,
                measured_mean_s=job.measured_mean_s,
                measured_p95_s=job.measured_p95_s,
                error=job.error_of(job.forecast.mean_s),
            )
            for job in forecast.jobs
        ],
        error=skill.forecast,
        fifo_error=skill.fifo,
        alone_error=skill.alone,
        skill=skill.skill,
        skill_over_fifo=skill.skill_over_fifo,
        left_out=forecast.left_out,
    )


def _job(group: GroupFidelity, job: str) -> JobCycles:
    cycles = [cycle for cycle in group.recorded.cycles if cycle.job == job]
    laws = {drawn.job: drawn.predicted_s for drawn in group.drawn}
    return JobCycles(
        job=job,
        cycles=len(cycles),
        measured_s=_quantiles([cycle.measured_s for cycle in cycles]),
        predicted_s=_quantiles([cycle.predicted_s for cycle in cycles]),
        error=errors_of([cycle.error for cycle in cycles]),
        law_s=laws.get(job),
        alone_s=median(cycle.alone_s for cycle in cycles),
    )


def _quantiles(values: Sequence[float]) -> CycleQuantiles:
    return CycleQuantiles(median(values), p95_of(values))
