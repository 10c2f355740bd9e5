"""Predicts one recorded run, or a planned one, from the recordings of others. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plexrl.errors import InvalidRequestError
from plexrl.sim.fidelity.forecast import (
    ForecastError,
    JobForecast,
    PlannedJob,
    compare_forecast,
    forecast,
    profile_of,
)
from plexrl.sim.fidelity.history import FoundJob, LeftOut, recorded_jobs
from plexrl.sim.fidelity.planning import Planning
from plexrl.sim.fidelity.recording import RecordedJob
from plexrl.traces.convert.history import History


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """A recorded run beside its forecast."""

    jobs: tuple[ForecastError, ...]
    left_out: tuple[LeftOut, ...]
    """Jobs that are not predicted. Waiting of others for them is not predicted either."""


def profiles_in(
    sources: Sequence[History], *, warm_up: int
) -> tuple[dict[str, RecordedJob], tuple[LeftOut, ...]]:
    """The profile of each job name in these recordings, and the jobs without one.

    Raises:
        InvalidRequestError: a recording has no usable job, or one name has different jobs.
    """
    by_name: dict[str, list[RecordedJob]] = {}
    left_out: list[LeftOut] = []
    for source in sources:
        found, without = recorded_jobs(source, warm_up=warm_up)
        left_out += without
        for each in found:
            by_name.setdefault(each.past.name, []).append(each.job)
    profiles = {name: profile_of(jobs, warm_up=warm_up) for name, jobs in sorted(by_name.items())}
    return profiles, tuple(left_out)


def forecast_run(
    run: History,
    sources: Sequence[History],
    planning: Planning,
    *,
    seeds: Sequence[int],
    warm_up: int,
) -> RunForecast:
    """Predict `run` from other recordings of its jobs, by name, and compare the mean cycles.

    Inputs from the run itself are its list of jobs (name, submission, number of cycles) and the
    number of groups. Jobs that are in `sources`, by id, are not predicted. `policy` is the
    simulated planning, which should match the cluster's.

    Raises:
        InvalidRequestError: no job of the run was recorded elsewhere, sizes differ, or the policy
            is unknown.
    """
    profiles, _ = profiles_in(sources, warm_up=warm_up)
    found, left_out = _new_jobs(run, sources, warm_up)
    known = [each for each in found if each.past.name in profiles]
    unknown = tuple(
        LeftOut(job=each.name, reason="no other recording has a job of this name")
        for each in found
        if each.past.name not in profiles
    )
    if not known:
        raise InvalidRequestError(
            f"the recordings have {', '.join(profiles)}, and the predicted run has other jobs: "
            f"{', '.join(each.name for each in found)}"
        )
    began_at = min(each.job.began_at for each in known)
    mix = [
        PlannedJob(
            name=each.name,
            profile=profiles[each.past.name],
            submit_s=each.job.began_at - began_at,
            cycles=len(each.job.cycles),
        )
        for each in known
    ]
    groups = len({each.group for each in known})
    predicted = forecast(mix, planning, seeds=seeds, warm_up=warm_up, groups=groups)
    measured = {each.name: [c.took_s for c in each.job.cycles[warm_up:]] for each in known}
    return RunForecast(jobs=compare_forecast(predicted, measured), left_out=(*left_out, *unknown))


def _new_jobs(
    run: History, sources: Sequence[History], warm_up: int
) -> tuple[tuple[FoundJob, ...], tuple[LeftOut, ...]]:
    """The jobs of a run that are in none of its sources: a cluster's later recording also has the
    jobs of earlier ones."""
    earlier = {job.job for source in sources for job in source.jobs}
    if all(job.job in earlier for job in run.jobs):
        raise InvalidRequestError(
            "all jobs of the predicted recording are also in the others, which would be compared "
            "with themselves: record another run"
        )
    new = tuple(job for job in run.jobs if job.job not in earlier)
    return recorded_jobs(replace(run, jobs=new), warm_up=warm_up)


def forecast_mix(
    copies: Mapping[str, int],
    sources: Sequence[History],
    planning: Planning,
    *,
    cycles: int,
    seeds: Sequence[int],
    warm_up: int,
    groups: int = 1,
) -> tuple[JobForecast, ...]:
    """Predict a planned run of recorded jobs that begin together.

    `copies`: how many of each job name. `cycles`: cycles of the job with the longest ones; the
    others run as many as fit into the same time alone.

    Raises:
        InvalidRequestError: a name was not recorded, sizes differ, or the policy is unknown.
    """
    profiles, _ = profiles_in(sources, warm_up=warm_up)
    if missing := sorted(set(copies) - set(profiles)):
        raise InvalidRequestError(
            f"{', '.join(missing)}: the recordings have no such job; they have "
            f"{', '.join(profiles)}"
        )
    alone = {name: _alone_s(profiles[name]) for name in copies}
    longest_s = max(alone.values(), default=0.0)
    mix = [
        PlannedJob(
            name=name if count == 1 else f"{name} {copy}",
            profile=profiles[name],
            submit_s=0.0,
            cycles=round(cycles * longest_s / alone[name]),
        )
        for name, count in copies.items()
        for copy in range(1, count + 1)
    ]
    return forecast(mix, planning, seeds=seeds, warm_up=warm_up, groups=groups)


def _alone_s(profile: RecordedJob) -> float:
    return max(1e-6, sum(cycle.alone_s for cycle in profile.cycles) / len(profile.cycles))
