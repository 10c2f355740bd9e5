"""Lanes of the node groups over a window of time, from the history of operations.

`State.finished` has the last `history` operations, and what runs now is added. What ended earlier
is given from the archive. A long history is read in steps, between which the scheduler handles
events. The lanes end at the moment when the reading began.

Groups that exist come first, then those that are gone and had runs in the window.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from plexrl.ids import GroupId, TenantId
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.queries.overview.gpu_states import visible_groups
from plexrl.scheduler.queries.overview.runs import (
    OPERATIONS_PER_STEP,
    GroupRun,
    RunGroup,
    RunJob,
    group_runs,
    history_since,
    oldest_index,
)
from plexrl.scheduler.queries.overview.spans import LaneBand, Run, merge, uncovered
from plexrl.scheduler.state.records import Group, State
from plexrl.wire.messages.overview_views import (
    BAND_CELLS,
    LANES_MAX,
    SEVERAL_JOBS,
    SPANS_PER_LANE,
    STORED,
    LaneJobView,
    LanesView,
    LaneView,
    Span,
)

RUNS_PER_STEP: Final = 500
"""A step that makes spans and bands of so many runs takes about a millisecond."""


@dataclass(slots=True)
class LaneGroup:
    """A group of the window, and its runs."""

    about: RunGroup
    members: int
    is_gone: bool
    """It exists no longer, or the caller has no member in it."""
    runs: list[Run] = field(default_factory=list)


class LanesReader:
    """One reading of the history: `read_memory`, `add_earlier` if there is an archive, all `steps`,
    then `view`. Operations may leave the memory meanwhile, so it is read first."""

    def __init__(
        self, cluster: Cluster, tenant: TenantId | None, window: tuple[float, float], first: int
    ) -> None:
        """`window`: from and to; `first`: index of the first group with a lane."""
        self._tenant, self._first = tenant, first
        self._since, self._until = window
        self.groups: dict[GroupId, LaneGroup] = {}
        for group in visible_groups(cluster.state, tenant):
            self.groups[group.group] = _lane_group(group)
        self._next = cluster.state.finished_count
        self._jobs: dict[RunJob, int] = {}
        self._lanes: list[LaneView] = []
        self._bands: dict[int, LaneBand] = {}
        self._covered: list[tuple[float, float]] = []
        self.memory_since = history_since(cluster.state)
        """When the history in memory begins, or what was read of it; None: nothing has ended
        yet."""
        self._read_until = math.inf
        """When the last operation ended that was read."""
        self._add_running(cluster.state)

    @property
    def earlier(self) -> tuple[float, float] | None:
        """The part of the window that is before the history in memory; None: there is none."""
        end = self._until if self.memory_since is None else min(self.memory_since, self._until)
        return (self._since, end) if end > self._since else None

    def add_earlier(
        self, runs: Iterable[GroupRun], covered: Iterable[tuple[float, float]]
    ) -> Iterator[None]:
        """Add archived runs, as many steps as needed. `covered`: the times of which they tell."""
        self._covered += covered
        for number, run in enumerate(runs):
            if self.earlier is not None:
                self._add(run, self.earlier[1])
            if number % OPERATIONS_PER_STEP == OPERATIONS_PER_STEP - 1:
                yield

    def read_memory(self, cluster: Callable[[], Cluster]) -> Iterator[None]:
        """Read the history in memory; each step takes about a millisecond. `cluster` returns the
        present one."""
        while self._read_some(cluster().state):
            yield
        if self.memory_since is None:
            return
        if self._read_until > self._since:
            # Older ones may have left the memory between two steps.
            self.memory_since = max(self.memory_since, min(self._read_until, self._until))
        self._covered.append((self.memory_since, self._until))

    def steps(self) -> Iterator[None]:
        """Make the lanes; each step takes about a millisecond."""
        per_band = -(-len(self.groups) // LANES_MAX)
        for at, group in enumerate(self.groups.values()):
            has_lane = self._first <= at < self._first + LANES_MAX
            spans = self._new_lane(group) if has_lane else None
            band = self._band(at, per_band, group) if per_band > 1 else None
            runs, covered = sorted(group.runs, key=_order), 0.0
            # One group may have had all that is in the history.
            for begin in range(0, len(runs), RUNS_PER_STEP):
                some = runs[begin : begin + RUNS_PER_STEP]
                if spans is not None:
                    merge(some, self.pixel_s, self._number, spans)
                if band is not None:
                    covered = band.add(_on_gpus(some), group.about.gpus, covered)
                yield

    def view(self) -> LanesView:
        """What was read."""
        gaps = uncovered(self._covered, self._since, self._until) if self._covered else []
        known = [begin for begin, _ in self._covered]
        return {
            "since": self._since,
            "until": self._until,
            "oldest": min(known, default=None),
            "gaps": [(round(begin, 3), round(end, 3)) for begin, end in gaps],
            "groups": len(self.groups),
            "first": self._first,
            "jobs": [_job_view(job) for job in self._jobs],
            "lanes": self._lanes,
            "bands": [band.view() for band in self._bands.values()],
        }

    def _read_some(self, state: State) -> bool:
        """Read some older operations; returns whether more are left."""
        oldest = oldest_index(state)
        stop = max(oldest - 1, self._next - OPERATIONS_PER_STEP)
        for index in range(self._next, stop, -1):
            operation = state.operations[state.finished[index]]
            assert operation.finished_at is not None, "it is in the history"
            self._read_until = operation.finished_at
            if operation.finished_at <= self._since:
                # The log is in the order of ends.
                return False
            for run in group_runs(state, operation, operation.finished_at):
                self._add(run, self._until)
        self._next = stop
        return stop >= oldest

    def _add_running(self, state: State) -> None:
        """Add what the holders of the groups do now."""
        for group in list(self.groups):
            name = state.groups[group].holder
            if name is None:
                continue
            holder = state.deployments[name]
            moving = [] if holder.wpg.moving is None else [holder.wpg.moving]
            for command in (*holder.work.running.values(), *moving):
                operation = state.operations[command.operation]
                for run in group_runs(state, operation, self._until):
                    if run.group.group == group:
                        self._add(run, self._until)

    def _add(self, run: GroupRun, until: float) -> None:
        """Add the part of a run that is in the window and before `until`, if the caller may see
        it."""
        begin, end = max(run.begin, self._since), min(run.end, until)
        if end <= begin or (self._tenant is not None and _tenant(run) != self._tenant):
            return
        group = self.groups.get(run.group.group)
        if group is None:
            group = self.groups[run.group.group] = LaneGroup(run.group, 0, True)
        group.runs.append((begin - self._since, end - self._since, run.job, run.kind))

    @property
    def pixel_s(self) -> float:
        """Runs that are shorter, or so near, are merged."""
        return (self._until - self._since) / SPANS_PER_LANE

    def _new_lane(self, group: LaneGroup) -> list[Span]:
        """Add a lane; returns its spans, which are to be filled."""
        spans: list[Span] = []
        self._lanes.append(
            {
                "group": group.about.group,
                "gpus": group.about.gpus,
                "node_type": group.about.node_type,
                "members": group.members,
                "is_gone": group.is_gone,
                "spans": spans,
            }
        )
        return spans

    def _number(self, job: RunJob | None) -> int:
        """The job's index, in the order in which jobs are met."""
        return SEVERAL_JOBS if job is None else self._jobs.setdefault(job, len(self._jobs))

    def _band(self, at: int, per_band: int, group: LaneGroup) -> LaneBand:
        """The band of the group at this index, which has the group now."""
        cell_s = (self._until - self._since) / BAND_CELLS
        band = self._bands.setdefault(at // per_band, LaneBand(at, cell_s))
        band.enter(group.about.gpus)
        return band


def _lane_group(group: Group) -> LaneGroup:
    about = RunGroup(group.group, len(group.gpus), group.node_type)
    return LaneGroup(about, len(group.members) + len(group.fillers), False)


def _order(run: Run) -> tuple[float, float, RunJob | tuple[()], int]:
    begin, end, job, kind = run
    return begin, end, job or (), kind


def _on_gpus(runs: Iterable[Run]) -> list[Run]:
    """Without those that used no GPU."""
    return [run for run in runs if run[3] != STORED]


def _tenant(run: GroupRun) -> TenantId | None:
    return None if run.job is None else run.job.tenant


def _job_view(job: RunJob) -> LaneJobView:
    return {"job": job.job, "name": job.name, "tenant": job.tenant}
