"""Predicts a recorded history group by group, and reports the errors. Pure.

Jobs that shared one group are predicted together (`plexrl.sim.fidelity.fidelity`). A job is left
out, with the reason, if it does not have exactly one training deployment, moved between groups, or
has too few or unequal cycles. Waiting of others for such a job is not predicted either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.sim.fidelity.fidelity import Comparison, JobError, compare_drawn, compare_recorded
from plexrl.sim.fidelity.planning import Planning
from plexrl.sim.fidelity.recording import (
    NOT_IN_CYCLES,
    Overheads,
    RecordedJob,
    overheads,
    recorded_run,
)
from plexrl.traces.convert.history import History
from plexrl.traces.convert.recorder import record

Plain = dict[str, Any]


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
    view: Plain
    """Its row of `/v1/jobs`."""


@dataclass(slots=True, kw_only=True)
class _Sharers:
    """Jobs of one group."""

    jobs: list[RecordedJob] = field(default_factory=list)
    views: list[Plain] = field(default_factory=list)
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
    rows = _by_deployment(history)
    found, left_out = recorded_jobs(history, alone=alone, warm_up=warm_up)
    groups: dict[tuple[str, int], _Sharers] = {}
    for each in found:
        sharers = groups.setdefault((each.group, each.job.gpus), _Sharers())
        sharers.jobs.append(each.job)
        sharers.views.append(each.view)
        sharers.names[each.view["job"]] = each.name
    return HistoryFidelity(
        groups=tuple(
            GroupFidelity(
                group=group,
                recorded=compare_recorded(sharers.jobs, planning, warm_up=warm_up),
                drawn=_by_drawn_cycles(sharers, rows, history.now, planning, seeds, warm_up),
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
    rows = _by_deployment(history)
    beyond = {} if alone is None else _overheads(alone)
    jobs: list[FoundJob] = []
    left_out: list[LeftOut] = []
    for view in _plain(history)["jobs"]:
        name = _name(view, history)
        own = [row for each in _training(view) for row in rows.get(each["deployment"], ())]
        found = _predictable({**view, "name": name}, own, beyond.get(view["name"]), warm_up)
        if isinstance(found, str):
            left_out.append(LeftOut(job=name, reason=found))
        else:
            jobs.append(FoundJob(name=name, group=found[0], job=found[1], view=view))
    if not jobs:
        reasons = "; ".join(f"{each.job}: {each.reason}" for each in left_out) or "it has none"
        raise InvalidRequestError(f"none of the recording's jobs can be predicted: {reasons}")
    return tuple(jobs), tuple(left_out)


def _predictable(
    view: Plain, own: Sequence[Plain], beyond: Overheads | None, warm_up: int
) -> tuple[str, RecordedJob] | str:
    """The group and the cycles of a job, or the reason why it is left out."""
    training = _training(view)
    visited = sorted({row["group"] for row in own if _is_work(row)})
    if len(training) != 1:
        return f"it has {len(training)} training deployments"
    if not visited:
        return "the log has no operations of it"
    if len(visited) > 1:
        return f"it moved between the groups {', '.join(visited)}"
    try:
        (job,) = recorded_run([view], own, {view["name"]: beyond or overheads(own)})
    except InvalidRequestError as error:
        return error.message
    if len(job.cycles) <= warm_up:
        return f"of its {len(job.cycles)} whole cycles the first {warm_up} are warm-up"
    return visited[0], job


def _by_drawn_cycles(
    sharers: _Sharers,
    rows: Mapping[str, Sequence[Plain]],
    now: float,
    planning: Planning,
    seeds: Sequence[int],
    warm_up: int,
) -> tuple[JobError, ...]:
    # References and judges have GPUs and cycles of their own.
    views = [
        {**view, "deployments": [d for d in view["deployments"] if d["kind"] != "forward"]}
        for view in sharers.views
    ]
    own = [
        row
        for view in views
        for each in view["deployments"]
        for row in rows.get(each["deployment"], ())
    ]
    recorded = record(views, own, now)
    if not all(job.cycles and job.segments for job in recorded):
        return ()
    names = sharers.names
    return compare_drawn(recorded, sharers.jobs, planning, seeds, names=names, warm_up=warm_up)


def _overheads(alone: History) -> dict[str, Overheads]:
    """Overheads of each job's training operations, by job name."""
    rows = _by_deployment(alone)
    return {
        view["name"]: overheads(
            row for each in _training(view) for row in rows.get(each["deployment"], ())
        )
        for view in _plain(alone)["jobs"]
    }


def _by_deployment(history: History) -> dict[str, list[Plain]]:
    found: dict[str, list[Plain]] = {}
    for row in _plain(history)["operations"]:
        # Operations without a measured compute time count as computing for 0 s.
        row["compute_s"] = row["compute_s"] or 0.0
        found.setdefault(row["deployment"], []).append(row)
    return found


def _plain(history: History) -> Plain:
    plain: Plain = msgspec.to_builtins(history)
    return plain


def _name(view: Plain, history: History) -> str:
    """The job's name, with its id if another job has the same name."""
    alike = sum(job.name == view["name"] for job in history.jobs)
    return view["name"] if alike == 1 else f"{view['name']} ({view['job']})"


def _training(view: Plain) -> list[Plain]:
    return [each for each in view["deployments"] if each["kind"] == "train"]


def _is_work(row: Plain) -> bool:
    return row["started_at"] is not None and row["kind"] not in NOT_IN_CYCLES
