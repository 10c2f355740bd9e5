"""Predicts the cycles of jobs that share a group from recordings of other runs. Pure.

A job's profile is what it did in earlier runs, whoever it shared with: its whole cycles without
waiting, and the moves of its state. The simulator draws from these cycles at random, each cycle
whole, so that a rollout keeps the tokens that it made. The mix to predict is a list of jobs: their
profiles, their submissions and their numbers of cycles. Nothing else of the predicted run is an
input.

Two simpler predictions from the same profiles show what this one is worth: nobody waits, and a
first-in-first-out queue in the simulator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from plexrl.errors import InvalidRequestError
from plexrl.sim.fidelity.errors import Errors, errors_of, p95_of
from plexrl.sim.fidelity.fidelity import RecordedCycles, simulate_cycles
from plexrl.sim.fidelity.planning import Planning
from plexrl.sim.fidelity.recording import RecordedJob
from plexrl.sim.workload.counter_rng import stream, word
from plexrl.sim.workload.cycles import DrawnCycle
from plexrl.sim.workload.scenario import Behaviour, Detail
from plexrl.traces import TraceJob


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """One job of the mix that is predicted."""

    name: str
    """Unique in the mix."""
    profile: RecordedJob
    """Its earlier cycles, without those of warm-up."""
    submit_s: float
    """Submission, from the start of the mix."""
    cycles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForecast:
    """Predicted cycles of one job after its warm-up, in seconds."""

    job: str
    mean_s: float
    p95_s: float
    fifo_s: float
    """Mean cycle with a first-in-first-out queue."""
    alone_s: float
    """Mean cycle if the job never waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastError:
    """A job's forecast beside what was measured later."""

    forecast: JobForecast
    cycles: int
    measured_mean_s: float
    measured_p95_s: float

    def error_of(self, predicted_s: float) -> float:
        """Relative error of a predicted mean cycle, positive if it is too long."""
        return predicted_s / self.measured_mean_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """Errors of the predicted mean cycles over several jobs."""

    forecast: Errors
    fifo: Errors
    alone: Errors

    @property
    def skill(self) -> float:
        """The part of the mean error of "nobody waits" that the forecast avoids; 1: all of it."""
        return _skill(self.forecast, self.alone)

    @property
    def skill_over_fifo(self) -> float:
        """The part of the mean error of a first-in-first-out queue that the forecast avoids."""
        return _skill(self.forecast, self.fifo)


def profile_of(recordings: Sequence[RecordedJob], *, warm_up: int) -> RecordedJob:
    """One job's cycles from all recordings of it, without the first `warm_up` of each.

    A cycle's operations last as long as they held the group. Moves are averaged over the recordings
    with moves.

    Raises:
        InvalidRequestError: the recordings are of different jobs, or have only cycles of warm-up.
    """
    first = recordings[0]
    kept = tuple(
        replace(cycle, segments_s=cycle.held_s)
        for recording in recordings
        for cycle in recording.cycles[warm_up:]
    )
    if not kept:
        raise InvalidRequestError(
            f"{first.name} ran no more than the {warm_up} cycles of warm-up: record it longer"
        )
    for recording in recordings[1:]:
        if (recording.kinds, recording.gpus) != (first.kinds, first.gpus):
            raise InvalidRequestError(
                f"the recordings of {first.name} have different operations or GPUs "
                f"({', '.join(first.kinds)} on {first.gpus}; {', '.join(recording.kinds)} on "
                f"{recording.gpus}): give one job one name"
            )
    return replace(
        first,
        cycles=kept,
        load_s=_mean_move([recording.load_s for recording in recordings]),
        offload_s=_mean_move([recording.offload_s for recording in recordings]),
        control_s=median(recording.control_s for recording in recordings),
    )


def forecast(
    mix: Sequence[PlannedJob],
    planning: Planning,
    *,
    seeds: Sequence[int],
    warm_up: int,
    groups: int = 1,
) -> tuple[JobForecast, ...]:
    """Predict the cycles of a mix on `groups` groups of the jobs' GPUs under `planning`.

    The prediction is over all `seeds`, without the first `warm_up` cycles of each job.

    Raises:
        InvalidRequestError: the mix is empty, a job has only cycles of warm-up, sizes differ, or no
            recording has a context switch although jobs share.
    """
    if not mix:
        raise InvalidRequestError("no jobs are given: there is nothing to predict")
    if short := [job.name for job in mix if job.cycles <= warm_up]:
        raise InvalidRequestError(
            f"{', '.join(short)}: plan more cycles than the {warm_up} of warm-up"
        )
    if len(mix) > groups and not any(job.profile.offload_s for job in mix):
        raise InvalidRequestError(
            "the recordings have no context switch, so its duration is unknown: also record a run "
            "in which jobs share a group"
        )
    predicted = _cycles(mix, planning, seeds, warm_up, groups)
    by_fifo = _cycles(mix, planning.fifo, seeds, warm_up, groups)
    return tuple(
        JobForecast(
            job=job.name,
            mean_s=fmean(predicted[job.name]),
            p95_s=p95_of(predicted[job.name]),
            fifo_s=fmean(by_fifo[job.name]),
            alone_s=fmean(cycle.alone_s for cycle in job.profile.cycles),
        )
        for job in mix
    )


def compare_forecast(
    forecasts: Sequence[JobForecast], measured: Mapping[str, Sequence[float]]
) -> tuple[ForecastError, ...]:
    """Each forecast beside the seconds of the job's measured cycles after their warm-up."""
    return tuple(
        ForecastError(
            forecast=each,
            cycles=len(measured[each.job]),
            measured_mean_s=fmean(measured[each.job]),
            measured_p95_s=p95_of(measured[each.job]),
        )
        for each in forecasts
    )


def skill_of(found: Sequence[ForecastError]) -> Skill:
    """Errors over the jobs of one or several runs."""
    return Skill(
        forecast=errors_of([abs(each.error_of(each.forecast.mean_s)) for each in found]),
        fifo=errors_of([abs(each.error_of(each.forecast.fifo_s)) for each in found]),
        alone=errors_of([abs(each.error_of(each.forecast.alone_s)) for each in found]),
    )


class ResampledCycles:
    """Draws a recorded job's cycles at random, with replacement."""

    __slots__ = ("_count", "_cycles", "_key", "functions")

    def __init__(self, profile: RecordedJob, name: str, seed: int) -> None:
        self._cycles = RecordedCycles(profile)
        self._count = len(profile.cycles)
        self._key = stream(seed, "recorded cycles", name)
        self.functions = self._cycles.functions

    def draw(self, number: int) -> DrawnCycle:
        """The `number`-th cycle; repeated calls return equal cycles."""
        return self._cycles.draw(word(self._key, number) % self._count)


def _cycles(
    mix: Sequence[PlannedJob], planning: Planning, seeds: Sequence[int], warm_up: int, groups: int
) -> dict[str, list[float]]:
    """Simulated cycles of all seeds by job, after the warm-up."""
    profiles = {job.name: job.profile for job in mix}

    def cycles_of(
        job: TraceJob, behaviour: Behaviour, seed: int, *, detail: Detail
    ) -> ResampledCycles:
        del behaviour, detail
        return ResampledCycles(profiles[job.job_id], job.job_id, seed)

    rows = [
        TraceJob(
            job_id=job.name,
            submit_s=job.submit_s,
            gpus=job.profile.gpus,
            state_bytes=job.profile.state_bytes,
            cycles=job.cycles,
            period_s=max(1e-3, fmean(cycle.alone_s for cycle in job.profile.cycles)),
        )
        for job in sorted(mix, key=lambda job: (job.submit_s, job.name))
    ]
    found: dict[str, list[float]] = {job.name: [] for job in mix}
    for seed in seeds:
        took = simulate_cycles(
            rows,
            list(profiles.values()),
            planning,
            seed=seed,
            cycle_factory=cycles_of,
            groups=groups,
        )
        for name, each in took.items():
            found[name] += each[warm_up:]
    return found


def _mean_move(seconds: Sequence[float]) -> float:
    known = [second for second in seconds if second > 0.0]
    return fmean(known) if known else 0.0


def _skill(forecast: Errors, other: Errors) -> float:
    return 1.0 - forecast.mean / other.mean if other.mean else 0.0
