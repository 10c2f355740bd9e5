"""Failures as they come true in a run: nodes go and come back, processes die."""

import heapq
from collections.abc import Callable, Iterator, Sequence

from plexrl.ids import DeploymentId, NodeId
from plexrl.sim.engine.failures import NodeFailure, node_failures, worker_failures
from plexrl.sim.engine.shell import NEVER, VirtualShell
from plexrl.sim.workload.scenario import Scenario

COMPACTED_FROM = 64
"""Entries of the heap, before those of jobs that have ended are swept out."""


class Breakdowns:
    """Has failures happen until the run is over, or nothing but failures is to come: a run that is
    stuck would never end otherwise. Holds an entry for each node and each live job."""

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
        """`lose_node` is told whether what the node has in host memory survives; `lose_worker` has
        a process of a deployment die, if there is one."""
        self._shell = shell
        self._failures = scenario.failures
        self._seed = scenario.seed
        self._lose_node = lose_node
        self._return_node = return_node
        self._lose_worker = lose_worker
        self._nodes = node_failures(self._failures, self._seed, nodes)
        self._jobs: dict[DeploymentId, Iterator[float]] = {}
        """When processes of live jobs fail."""
        self._heap: list[tuple[float, DeploymentId]] = []
        """Of these the next each, and some of jobs that have ended."""
        self._wake_at = NEVER
        self._planned = 0
        """Happenings that are failures yet to come."""

    def start(self) -> None:
        """The cluster is there."""
        self._expect_node()

    def job_submitted(self, deployment: DeploymentId, job_id: str) -> None:
        """Its processes fail from now on."""
        if self._failures.worker_mtbf_s > 0.0:
            now = self._shell.now
            times = worker_failures(self._failures, self._seed, job_id)
            self._jobs[deployment] = (now + after_s for after_s in times)
            self._expect_worker(deployment)

    def job_ended(self, deployment: DeploymentId) -> None:
        """Nothing of it can fail any more."""
        if self._jobs.pop(deployment, None) is None:
            return
        if len(self._heap) > max(COMPACTED_FROM, 2 * len(self._jobs)):
            self._heap = [each for each in self._heap if each[1] in self._jobs]
            heapq.heapify(self._heap)

    def _expect_node(self) -> None:
        failure = next(self._nodes, None)
        if failure is not None:
            self._plan(failure.lost_at, self._lose, failure)

    def _lose(self, failure: NodeFailure) -> None:
        self._planned -= 1
        if self._goes_on():
            self._shell.at(failure.back_at, self._return_node, NodeId(failure.node))
            self._lose_node(NodeId(failure.node), failure.survives)
            self._expect_node()

    def _expect_worker(self, deployment: DeploymentId) -> None:
        heapq.heappush(self._heap, (next(self._jobs[deployment]), deployment))
        self._wake()

    def _wake(self) -> None:
        if self._heap and self._heap[0][0] < self._wake_at:
            self._wake_at = self._heap[0][0]
            self._plan(self._wake_at, self._kill, self._wake_at)

    def _kill(self, at: float) -> None:
        self._planned -= 1
        if at != self._wake_at or not self._goes_on():
            # Another came to stand before it, and woke this up already.
            return
        self._wake_at = NEVER
        while self._heap and self._heap[0][0] <= at:
            _, deployment = heapq.heappop(self._heap)
            if deployment in self._jobs:
                self._lose_worker(deployment)
            if deployment in self._jobs:
                self._expect_worker(deployment)
        self._wake()

    def _goes_on(self) -> bool:
        return self._shell.planned > self._planned

    def _plan(self, at: float, happen: Callable[..., None], subject: object) -> None:
        self._planned += 1
        self._shell.at(at, happen, subject)
