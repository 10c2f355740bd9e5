"""The fidelity of a history as plain values, for JSON and tables."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from plexrl.sim.fidelity.errors import errors_of, p95_of
from plexrl.sim.fidelity.forecast import JobForecast, skill_of
from plexrl.sim.fidelity.history import GroupFidelity, HistoryFidelity
from plexrl.sim.fidelity.run_forecast import RunForecast

Plain = dict[str, Any]


def fidelity_values(found: HistoryFidelity, policy: str) -> Plain:
    """Measured and predicted cycles of every job, and the errors, under the simulated `policy`."""
    return {
        "policy": policy,
        "groups": [
            {
                "group": group.group,
                "cycles": len(group.recorded.cycles),
                "error": asdict(group.recorded.errors),
                "alone_error": asdict(group.recorded.alone_errors),
                "jobs": [_job(group, job.job) for job in group.recorded.jobs],
            }
            for group in found.groups
        ],
        "left_out": [asdict(each) for each in found.left_out],
    }


def run_forecast_values(found: RunForecast, policy: str) -> Plain:
    """Measured and predicted mean cycles of every job, and the errors and the skill."""
    skill = skill_of(found.jobs)
    return {
        "policy": policy,
        "jobs": [
            {
                **forecast_values(job.forecast),
                "cycles": job.cycles,
                "measured_mean_s": job.measured_mean_s,
                "measured_p95_s": job.measured_p95_s,
                "error": job.error_of(job.forecast.mean_s),
            }
            for job in found.jobs
        ],
        "error": asdict(skill.forecast),
        "fifo_error": asdict(skill.fifo),
        "alone_error": asdict(skill.alone),
        "skill": skill.skill,
        "skill_over_fifo": skill.skill_over_fifo,
        "left_out": [asdict(each) for each in found.left_out],
    }


def forecast_values(found: JobForecast) -> Plain:
    """The predicted cycles of one job."""
    return asdict(found)


def _job(group: GroupFidelity, job: str) -> Plain:
    cycles = [cycle for cycle in group.recorded.cycles if cycle.job == job]
    laws = {each.job: each.predicted_s for each in group.drawn}
    return {
        "job": job,
        "cycles": len(cycles),
        "measured_s": _quantiles([cycle.measured_s for cycle in cycles]),
        "predicted_s": _quantiles([cycle.predicted_s for cycle in cycles]),
        "error": asdict(errors_of([cycle.error for cycle in cycles])),
        "law_s": laws.get(job),
        "alone_s": median(cycle.alone_s for cycle in cycles),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "p95": p95_of(values)}
