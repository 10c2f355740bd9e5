"""Lanes of the node groups over a window of time, from the history of operations.

The history is the only record: `State.finished` has the last `history` operations, and what runs
now is added. A long history is read in steps, between which the scheduler handles events. The lanes
end at the moment when the reading began.

Runs shorter than a pixel are merged, so an answer has a bounded size at any rate of operations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from plexrl.ids import GroupId, JobId, TenantId
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.queries.overview.gpu_states import owner, visible_groups
from plexrl.scheduler.rules.lookups import owner_of
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Group, State
from plexrl.wire.messages.overview_views import (
    BAND_CELLS,
    LANES_MAX,
    SEVERAL_JOBS,
    SPANS_PER_LANE,
    BandView,
    LaneJobView,
    LanesView,
    LaneView,
    Span,
)
from plexrl.wire.operations import MOVES

OPERATIONS_PER_STEP: Final = 2000
"""A step over so many operations takes about a millisecond."""
RUNS_PER_STEP: Final = 500
"""Likewise a step that makes spans and bands of so many runs."""

Run = tuple[float, float, JobId, bool]
"""Start and end in seconds after the window's begin, the job, and whether it is a switch."""


class LanesReader:
    """One reading of the history: all `steps`, then `view`."""

    def __init__(
        self, cluster: Cluster, tenant: TenantId | None, window: tuple[float, float], first: int
    ) -> None:
        """`window`: from and to; `first`: index of the first group with a lane."""
        self._tenant, self._first = tenant, first
        self._since, self._until = window
        self._groups = visible_groups(cluster.state, tenant)
        self.runs: dict[GroupId, list[Run]] = {group.group: [] for group in self._groups}
        self._next = cluster.state.finished_count
        self._jobs: dict[JobId, int] = {}
        self._lanes: list[LaneView] = []
        self._bands: dict[int, LaneBand] = {}
        self._add_running(cluster.state)

    def steps(self, cluster: Callable[[], Cluster]) -> Iterator[None]:
        """Read; each step takes about a millisecond. `cluster` returns the present one."""
        while self._read_some(cluster().state):
            yield
        per_band = -(-len(self._groups) // LANES_MAX)
        for at, group in enumerate(self._groups):
            has_lane = self._first <= at < self._first + LANES_MAX
            spans = self._new_lane(group) if has_lane else None
            band = self._band(at, per_band, group) if per_band > 1 else None
            runs, covered = sorted(self.runs[group.group]), 0.0
            # One group may have had all that is in the history.
            for begin in range(0, len(runs), RUNS_PER_STEP):
                some = runs[begin : begin + RUNS_PER_STEP]
                if spans is not None:
                    merge(some, self._least_s, self._number, spans)
                if band is not None:
                    covered = band.add(some, len(group.gpus), covered)
                yield

    def view(self, cluster: Cluster) -> LanesView:
        """What was read."""
        return {
            "since": self._since,
            "until": self._until,
            "oldest": _oldest(cluster.state),
            "groups": len(self._groups),
            "first": self._first,
            "jobs": [_job_view(cluster.state, job) for job in self._jobs],
            "lanes": self._lanes,
            "bands": [band.view() for band in self._bands.values()],
        }

    def _read_some(self, state: State) -> bool:
        """Read some older operations; returns whether more are left."""
        oldest = state.finished_count - len(state.finished) + 1
        stop = max(oldest - 1, self._next - OPERATIONS_PER_STEP)
        for index in range(self._next, stop, -1):
            operation = state.operations[state.finished[index]]
            assert operation.finished_at is not None, "it is in the history"
            if operation.finished_at <= self._since:
                # The log is in the order of ends.
                return False
            self._add(state, operation, operation.finished_at)
        self._next = stop
        return stop >= oldest

    def _add_running(self, state: State) -> None:
        """Add what the holders of the groups do now."""
        for group in self._groups:
            holder = None if group.holder is None else state.deployments[group.holder]
            if holder is None:
                continue
            moving = [] if holder.wpg.moving is None else [holder.wpg.moving]
            for command in (*holder.work.running.values(), *moving):
                operation = state.operations[command.operation]
                if operation.started_at is not None:
                    self._add_run(state, group.group, operation, self._until)

    def _add(self, state: State, operation: Operation, end: float) -> None:
        if operation.started_at is None or operation.group is None:
            return
        for name in _groups_of(state, operation):
            self._add_run(state, name, operation, end)

    def _add_run(self, state: State, group: GroupId, operation: Operation, end: float) -> None:
        # Not of a dropped job, whose name another tenant's may have by now.
        runs, deployment = self.runs.get(group), owner_of(state, operation)
        if runs is None or deployment is None or operation.started_at is None:
            return
        if self._tenant not in (None, owner(state, operation.deployment)):
            return
        begin, end = max(operation.started_at, self._since), min(end, self._until)
        if end > begin:
            is_switch = operation.kind.value in MOVES
            runs.append((begin - self._since, end - self._since, deployment.job, is_switch))

    @property
    def _least_s(self) -> float:
        return (self._until - self._since) / SPANS_PER_LANE

    def _new_lane(self, group: Group) -> list[Span]:
        """Add a lane; returns its spans, which are to be filled."""
        spans: list[Span] = []
        self._lanes.append(
            {
                "group": group.group,
                "gpus": len(group.gpus),
                "node_type": group.node_type,
                "members": len(group.members) + len(group.fillers),
                "spans": spans,
            }
        )
        return spans

    def _number(self, job: JobId) -> int:
        """The job's index, in the order in which jobs are met."""
        return self._jobs.setdefault(job, len(self._jobs))

    def _band(self, at: int, per_band: int, group: Group) -> "LaneBand":
        """The band of the group at this index, which has the group now."""
        cell_s = (self._until - self._since) / BAND_CELLS
        band = self._bands.setdefault(at // per_band, LaneBand(at, cell_s))
        band.enter(len(group.gpus))
        return band


class LaneBand:
    """Busy GPUs of neighbouring groups, by cell."""

    def __init__(self, first: int, cell_s: float) -> None:
        self._first, self._cell_s = first, cell_s
        self._groups = self._gpus = 0
        self.busy = [0.0] * BAND_CELLS
        """Busy GPUs of each cell."""

    def enter(self, gpus: int) -> None:
        """Add a group."""
        self._groups += 1
        self._gpus += gpus

    def add(self, runs: Sequence[Run], gpus: int, covered: float) -> float:
        """Add the next runs of a group, in order, of which those before end at `covered`; returns
        the latest end."""
        for begin, end in union(runs):
            if end > covered:
                self._fill(max(begin, covered) / self._cell_s, end / self._cell_s, gpus)
                covered = end
        return covered

    def view(self) -> BandView:
        """The band, a digit for each cell."""
        digits = [str(min(9, int(10 * part / self._gpus))) for part in self.busy]
        return {"first": self._first, "groups": self._groups, "busy": "".join(digits)}

    def _fill(self, begin: float, end: float, gpus: int) -> None:
        """Add the part of each cell between `begin` and `end`, in cells."""
        for at in range(int(begin), min(BAND_CELLS, int(end) + 1)):
            part = min(end, at + 1.0) - max(begin, float(at))
            self.busy[at] += max(0.0, part) * gpus


def merge(
    runs: Iterable[Run], least_s: float, number: Callable[[JobId], int], spans: list[Span]
) -> None:
    """Add runs, in order of their begins, to `spans`, of which about window / `least_s` are left.

    Runs of one job that are less than `least_s` apart become one. What is shorter than `least_s`
    joins the short span before it: then it is of `SEVERAL_JOBS` if they differ.
    """
    for begin, end, job, is_switch in runs:
        own = number(job)
        if spans:
            last_begin, last_end, last_job, last_switch = spans[-1]
            is_near = begin - last_end < least_s
            is_same = last_job == own and last_switch == is_switch
            are_short = end - begin < least_s and last_end - last_begin < least_s
            if is_near and (is_same or are_short):
                mixed = own if last_job == own else SEVERAL_JOBS
                kind = last_switch if last_switch == is_switch else 0
                spans[-1] = (last_begin, round(max(end, last_end), 3), mixed, kind)
                continue
        spans.append((round(begin, 3), round(end, 3), own, int(is_switch)))


def _groups_of(state: State, operation: Operation) -> Sequence[GroupId]:
    """The groups on which an operation ran; of one that spans several, those it has now."""
    assert operation.group is not None, "it ran"
    deployment = state.deployments.get(operation.deployment)
    if deployment is None or operation.group not in deployment.placement.groups:
        return (operation.group,)
    return deployment.placement.groups


def _oldest(state: State) -> float | None:
    """When the history begins."""
    if not state.finished:
        return None
    first = state.finished[state.finished_count - len(state.finished) + 1]
    return state.operations[first].finished_at


def _job_view(state: State, name: JobId) -> LaneJobView:
    """A job of a lane; it may have been dropped while the history was read."""
    job = state.jobs.get(name)
    if job is None:
        return {"job": name, "name": "", "tenant": TenantId("")}
    return {"job": name, "name": job.name, "tenant": job.tenant}


def union(runs: Iterable[Run]) -> list[tuple[float, float]]:
    """The times in which at least one of the runs ran, which are in order of their begins."""
    found: list[tuple[float, float]] = []
    for begin, end, _, _ in runs:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
