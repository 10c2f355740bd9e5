"""Sums up where the time of a job's operations went, from the history of operations, in steps."""

from collections.abc import Callable, Iterator
from typing import Final

from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.queries.overview.gpu_states import memory_of
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Job, State
from plexrl.wire.messages.overview_views import JobTimesView, TimesView
from plexrl.wire.operations import MOVES, OperationState

OPERATIONS_PER_STEP: Final = 4000


class TimesReader:
    """One reading of the history for a job: all `steps`, then `view`."""

    def __init__(self, state: State, job: Job) -> None:
        self._job = job
        self._names = {*job.deployments, *job.ended_deployments}
        self._next = state.finished_count
        self._rows: dict[tuple[DeploymentId, str], TimesView] = {}
        self._since: float | None = None

    def steps(self, cluster: Callable[[], Cluster]) -> Iterator[None]:
        """Read from the newest operation on; each step takes about a millisecond."""
        while self._read_some(cluster().state):
            yield

    def view(self, state: State) -> JobTimesView:
        """What was read, and the job's memory in the present state."""
        rows = [self._rows[key] for key in sorted(self._rows)]
        memory = memory_of(state, self._job)
        return {"job": self._job.job, "since": self._since, "memory": memory, "rows": rows}

    def _read_some(self, state: State) -> bool:
        oldest = state.finished_count - len(state.finished) + 1
        stop = max(oldest - 1, self._next - OPERATIONS_PER_STEP)
        for index in range(self._next, stop, -1):
            operation = state.operations[state.finished[index]]
            if operation.finished_at is not None and operation.finished_at < self._job.submitted_at:
                return False
            if operation.deployment in self._names:
                self._add(operation)
        self._next = stop
        return stop >= oldest

    def _add(self, operation: Operation) -> None:
        key = operation.deployment, operation.kind.value
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _empty(*key)
        row["operations"] += 1
        row["failed"] += operation.state is OperationState.FAILED
        row["queue_s"] += operation.queue_s or 0.0
        row["switch_s"] += operation.switch_s
        row["transfer_s"] += operation.transfer_s
        row["compute_s"] += operation.compute_s or 0.0
        row["other_s"] += _other_s(operation)
        known = operation.submitted_at if self._since is None else self._since
        self._since = min(known, operation.submitted_at)


def _other_s(operation: Operation) -> float:
    if operation.started_at is None or operation.finished_at is None:
        return 0.0
    run_s = operation.finished_at - operation.started_at
    if operation.kind.value in MOVES:
        return run_s
    return max(0.0, run_s - operation.transfer_s - (operation.compute_s or 0.0))


def _empty(deployment: DeploymentId, kind: str) -> TimesView:
    return {
        "deployment": deployment,
        "kind": kind,
        "operations": 0,
        "failed": 0,
        "queue_s": 0.0,
        "switch_s": 0.0,
        "transfer_s": 0.0,
        "compute_s": 0.0,
        "other_s": 0.0,
    }
