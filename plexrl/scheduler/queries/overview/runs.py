"""Runs of operations on node groups: who used which GPUs, from when to when.

A run outlives its operation, job and group, so it holds all that is told of them. The archive
stores runs (`service.journal.history`), and lanes are made of them.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from plexrl.ids import GroupId, JobId, TenantId
from plexrl.scheduler.rules.lookups import owner_of
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import State
from plexrl.wire.messages.overview_views import STORED, SWITCH, WORK
from plexrl.wire.operations import MOVES

OPERATIONS_PER_STEP: Final = 1000
"""A step over so many operations takes about a millisecond."""


class RunJob(NamedTuple):
    """The job of a run. A job's id may be used again, by another tenant, too."""

    job: JobId
    name: str
    tenant: TenantId


class RunGroup(NamedTuple):
    """The node group of a run."""

    group: GroupId
    gpus: int
    """Of a group that is gone when it is asked: those of the deployment that ran."""
    node_type: str


class GroupRun(NamedTuple):
    """One run on one of its groups; times in seconds on the scheduler's clock."""

    begin: float
    end: float
    job: RunJob | None
    """None: several jobs, each too short to be told apart."""
    kind: int
    """`WORK`, `SWITCH` or `STORED`."""
    group: RunGroup


def group_runs(state: State, operation: Operation, end: float) -> list[GroupRun]:
    """The runs of an operation that ended at `end`, one for each group that it ran on; none if it
    never ran, or if its job was dropped."""
    # Not of a dropped job, whose name another tenant's may have by now.
    deployment = owner_of(state, operation)
    if operation.started_at is None or operation.group is None or deployment is None:
        return []
    job = state.jobs[deployment.job]
    key = RunJob(job.job, job.name, job.tenant)
    names = operation.group, *operation.also_on
    part, begin, kind = (
        deployment.spec.workers // len(names),
        operation.started_at,
        _kind(operation),
    )
    return [GroupRun(begin, end, key, kind, _group(state, name, part)) for name in names]


def finished_operations(state: State, after: int, count: int) -> Iterator[Operation]:
    """At most `count` operations of the history from index `after` + 1 on; those that have left
    it are passed over."""
    for index in range(after + 1, min(after + count, state.finished_count) + 1):
        name = state.finished.get(index)
        if name is not None:
            yield state.operations[name]


def oldest_index(state: State) -> int:
    """Index of the oldest operation in the history; one more than the last if it is empty."""
    return state.finished_count - len(state.finished) + 1


def history_since(state: State) -> float | None:
    """When the history in memory begins; None: nothing has ended yet."""
    if not state.finished:
        return None
    return state.operations[state.finished[oldest_index(state)]].finished_at


def _kind(operation: Operation) -> int:
    if operation.kind.value in MOVES:
        return SWITCH
    # A stored run that was not enough is followed by a load and a run on the GPUs.
    return STORED if operation.is_stored and not operation.needs_load else WORK


def _group(state: State, name: GroupId, workers: int) -> RunGroup:
    group = state.groups.get(name)
    if group is None:
        return RunGroup(name, workers, "")
    return RunGroup(name, len(group.gpus), group.node_type)
