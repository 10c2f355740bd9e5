"""Predicts a recorded history group by group, and reports the errors. Pure.

Jobs that shared one group are predicted together (`plexrl.sim.fidelity.fidelity`). A job is left
out, with the reason, if it does not have exactly one training deployment, moved between groups, or
has too few or unequal cycles. Waiting of others for such a job is not predicted either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plexrl.errors import InvalidRequestError
from plexrl.sim.fidelity.fidelity import Comparison, JobError, compare_drawn, compare_recorded
from plexrl.sim.fidelity.planning import Planning
from plexrl.sim.fidelity.recording import (
    NOT_IN_CYCLES,
    Overheads,
    RecordedJob,
    overheads,
    recorded_run,
    training_of,
)
from plexrl.traces.convert.history import (
    History,
    PastDeployment,
    PastJob,
    PastOperation,
    by_deployment,
    runs_of,
)
from plexrl.traces.convert.recorder import record


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFidelity:
    """Predictions for the jobs of one group."""

    group: str
    recorded: Comparison
    """Prediction from the recorded durations of each cycle."""
    drawn: tuple[JobError, ...]
    """Prediction from drawn cycles; empty if the recorder found no profile of some job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A job that is not predicted."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFidelity:
    """Predictions for a whole history."""

    groups: tuple[GroupFidelity, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundJob:
    """A job of a history whose cycles are known."""

    name: str
    """Unique in the history."""
    group: str
    job: RecordedJob
    past: PastJob


@dataclass(slots=True, kw_only=True)
class _Sharers:
    """Jobs of one group."""

    jobs: list[RecordedJob] = field(default_factory=list)
    past: list[PastJob] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Job names by id."""


def fidelity_of(
    history: History,
    planning: Planning,
    *,
    alone: History | None = None,
    seeds: Sequence[int],
    warm_up: int,
) -> HistoryFidelity:
    """Predict a recorded history under `planning`, which should be that of its cluster.

    `alone`: a recording of the same jobs, by name, one after the other on a group without sharing;
    the control-plane overhead is measured there. Without it the overhead comes from the history
    itself, where a busy machine may have increased it. `seeds`: seeds of the drawn cycles.
    `warm_up`: first cycles of each job that are not compared.

    Raises:
        InvalidRequestError: no job can be predicted, or they have
            different GPUs.
    """
    operations = by_deployment(history.operations)
    jobs, left_out = recorded_jobs(history, alone=alone, warm_up=warm_up)
    groups: dict[tuple[str, int], _Sharers] = {}
    for job in jobs:
        sharers = groups.setdefault((job.group, job.job.gpus), _Sharers())
        sharers.jobs.append(job.job)
        sharers.past.append(job.past)
        sharers.names[job.past.job] = job.name
    return HistoryFidelity(
        groups=tuple(
            GroupFidelity(
                group=group,
                recorded=compare_recorded(sharers.jobs, planning, warm_up=warm_up),
                drawn=_by_drawn_cycles(sharers, operations, history.now, planning, seeds, warm_up),
            )
            for (group, _), sharers in sorted(groups.items())
        ),
        left_out=left_out,
    )


def recorded_jobs(
    history: History, *, warm_up: int, alone: History | None = None
) -> tuple[tuple[FoundJob, ...], tuple[LeftOut, ...]]:
    """The jobs of a history with more than `warm_up` whole cycles on one group, and the others with
    the reason. `alone`: as for `fidelity_of`.

    Raises:
        InvalidRequestError: no job has.
    """
    operations = by_deployment(history.operations)
    beyond = {} if alone is None else _overheads(alone)
    jobs: list[FoundJob] = []
    left_out: list[LeftOut] = []
    for past in history.jobs:
        name = _name(past, history)
        own = _training_operations(past, operations)
        group_and_job = _predictable(past, name, own, beyond.get(past.name), warm_up)
        if isinstance(group_and_job, str):
            left_out.append(LeftOut(job=name, reason=group_and_job))
        else:
            group, job = group_and_job
            jobs.append(FoundJob(name=name, group=group, job=job, past=past))
    if not jobs:
        reasons = "; ".join(f"{job.job}: {job.reason}" for job in left_out) or "it has none"
        raise InvalidRequestError(f"none of the recording's jobs can be predicted: {reasons}")
    return tuple(jobs), tuple(left_out)


def _predictable(
    past: PastJob,
    name: str,
    own: Sequence[PastOperation],
    beyond: Overheads | None,
    warm_up: int,
) -> tuple[str, RecordedJob] | str:
    """The group and the cycles of a job, or the reason why it is left out."""
    training = training_of(past)
    visited = sorted({run.group or "" for run in runs_of(own) if run.kind not in NOT_IN_CYCLES})
    if len(training) != 1:
        return f"it has {len(training)} training deployments"
    if not visited:
        return "the log has no operations of it"
    if len(visited) > 1:
        return f"it moved between the groups {', '.join(visited)}"
    try:
        (job,) = recorded_run([replace(past, name=name)], own, {name: beyond or overheads(own)})
    except InvalidRequestError as error:
        return error.message
    if len(job.cycles) <= warm_up:
        return f"of its {len(job.cycles)} whole cycles the first {warm_up} are warm-up"
    return visited[0], job


def _by_drawn_cycles(
    sharers: _Sharers,
    operations: Mapping[str, Sequence[PastOperation]],
    now: float,
    planning: Planning,
    seeds: Sequence[int],
    warm_up: int,
) -> tuple[JobError, ...]:
    # References and judges have GPUs and cycles of their own.
    jobs = [replace(job, deployments=_without_forward(job)) for job in sharers.past]
    own = [
        operation
        for job in jobs
        for deployment in job.deployments
        for operation in operations.get(deployment.deployment, ())
    ]
    recorded = record(jobs, own, now)
    if not all(job.cycles and job.segments for job in recorded):
        return ()
    names = sharers.names
    return compare_drawn(recorded, sharers.jobs, planning, seeds, names=names, warm_up=warm_up)


def _without_forward(job: PastJob) -> tuple[PastDeployment, ...]:
    return tuple(deployment for deployment in job.deployments if deployment.kind != "forward")


def _overheads(alone: History) -> dict[str, Overheads]:
    """Overheads of each job's training operations, by job name."""
    operations = by_deployment(alone.operations)
    return {job.name: overheads(_training_operations(job, operations)) for job in alone.jobs}


def _training_operations(
    job: PastJob, operations: Mapping[str, Sequence[PastOperation]]
) -> list[PastOperation]:
    training = training_of(job)
    return [each for deployment in training for each in operations.get(deployment.deployment, ())]


def _name(past: PastJob, history: History) -> str:
    """The job's name, with its id if another job has the same name."""
    alike = sum(job.name == past.name for job in history.jobs)
    return past.name if alike == 1 else f"{past.name} ({past.job})"
