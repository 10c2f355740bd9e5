"""Injects node and worker failures into a run."""

import heapq
from collections.abc import Callable, Iterator, Sequence

from plexrl.ids import DeploymentId, NodeId
from plexrl.sim.engine.faults.failures import NodeFailure, node_failures, worker_failures
from plexrl.sim.engine.shell import NEVER, VirtualShell
from plexrl.sim.workload.scenario import Scenario

COMPACTED_FROM = 64
"""Heap size from which entries of ended jobs are removed."""


class FaultInjector:
    """Schedules failures until the run is over or only failures are pending; otherwise a stuck run
    would never end. Memory: one entry for each node and each live job."""

    def __init__(
        self,
        shell: VirtualShell,
        scenario: Scenario,
        nodes: Sequence[NodeId],
        *,
        lose_node: Callable[[NodeId, bool], None],
        return_node: Callable[[NodeId], None],
        lose_worker: Callable[[DeploymentId], None],
    ) -> None:
        """`lose_node` also receives whether the node's host memory survives; `lose_worker` ends a
        process of a deployment, if it has one."""
        self._shell = shell
        self._failures = scenario.failures
        self._seed = scenario.seed
        self._lose_node = lose_node
        self._return_node = return_node
        self._lose_worker = lose_worker
        self._nodes = node_failures(self._failures, self._seed, nodes)
        self._jobs: dict[DeploymentId, Iterator[float]] = {}
        """Times of the worker failures of each live job."""
        self._heap: list[tuple[float, DeploymentId]] = []
        """The next failure of each live job, and of some ended ones."""
        self._wake_at = NEVER
        self._pending = 0
        """Scheduled calls that are failures."""

    def start(self) -> None:
        """Begin to inject node failures."""
        self._schedule_node_failure()

    def job_submitted(self, deployment: DeploymentId, job_id: str) -> None:
        """Begin to inject failures of the job's workers."""
        if self._failures.worker_mtbf_s > 0.0:
            now = self._shell.now
            times = worker_failures(self._failures, self._seed, job_id)
            self._jobs[deployment] = (now + after_s for after_s in times)
            self._schedule_worker_failure(deployment)

    def job_ended(self, deployment: DeploymentId) -> None:
        """Stop injecting failures of the job's workers."""
        if self._jobs.pop(deployment, None) is None:
            return
        if len(self._heap) > max(COMPACTED_FROM, 2 * len(self._jobs)):
            self._heap = [each for each in self._heap if each[1] in self._jobs]
            heapq.heapify(self._heap)

    def _schedule_node_failure(self) -> None:
        failure = next(self._nodes, None)
        if failure is not None:
            self._schedule(failure.lost_at, self._lose, failure)

    def _lose(self, failure: NodeFailure) -> None:
        self._pending -= 1
        if self._run_continues():
            self._shell.at(failure.back_at, self._return_node, NodeId(failure.node))
            self._lose_node(NodeId(failure.node), failure.survives)
            self._schedule_node_failure()

    def _schedule_worker_failure(self, deployment: DeploymentId) -> None:
        heapq.heappush(self._heap, (next(self._jobs[deployment]), deployment))
        self._schedule_next()

    def _schedule_next(self) -> None:
        if self._heap and self._heap[0][0] < self._wake_at:
            self._wake_at = self._heap[0][0]
            self._schedule(self._wake_at, self._fail_workers, self._wake_at)

    def _fail_workers(self, at: float) -> None:
        self._pending -= 1
        if at != self._wake_at or not self._run_continues():
            # An earlier failure was scheduled meanwhile, and its call handled this one.
            return
        self._wake_at = NEVER
        while self._heap and self._heap[0][0] <= at:
            _, deployment = heapq.heappop(self._heap)
            if deployment in self._jobs:
                self._lose_worker(deployment)
            if deployment in self._jobs:
                self._schedule_worker_failure(deployment)
        self._schedule_next()

    def _run_continues(self) -> bool:
        return self._shell.pending > self._pending

    def _schedule(self, at: float, callback: Callable[..., None], argument: object) -> None:
        self._pending += 1
        self._shell.at(at, callback, argument)
