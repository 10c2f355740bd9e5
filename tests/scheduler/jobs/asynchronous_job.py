"""An asynchronous job in virtual time: rollouts and trainer overlap under a staleness bound.

Batch b may be generated once the rollouts hold version b - staleness. The trainer takes one batch
after another; a step makes the next version.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster


class Clock:
    """Runs a cluster's commands for as long as they take."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self._ends: list[tuple[float, int, cmd.Run | Callable[[], None]]] = []
        """Runs that end, and what a controller does after a pause."""
        self._begun: set[tuple[str, int]] = set()
        self._numbers = count()
        self._seconds: dict[tuple[str, OperationKind], float] = {}
        self._on_end: dict[str, Callable[[], None]] = {}
        self.steps: dict[str, int] = {}
        """Optimizer steps of each trainer."""

    def takes(self, deployment: str, **seconds: float) -> None:
        """How long a deployment's operations of these kinds take; others take none."""
        for kind, value in seconds.items():
            self._seconds[deployment, OperationKind(kind)] = value

    def submit(
        self,
        operation: str,
        deployment: str,
        kind: str,
        on_end: Callable[[], None],
        **fields: object,
    ) -> None:
        """Submit an operation; `on_end` is called when it has finished."""
        self._on_end[operation] = on_end
        self.cluster.submit(operation, deployment, kind, **fields)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """A controller pauses, and then acts."""
        at = self.cluster.now + seconds
        heapq.heappush(self._ends, (at, next(self._numbers), action))

    def run_until(self, until: float) -> None:
        """Let everything happen up to a moment."""
        cluster = self.cluster
        while True:
            while cluster.launches:
                cluster.launch(cluster.launches[0])
            while cluster.migrations:
                cluster.migrate(cluster.migrations[0])
            for run in cluster.runs:
                if (run.operation, run.token) not in self._begun:
                    self._begun.add((run.operation, run.token))
                    seconds = self._seconds.get((run.deployment, run.kind), 0.0)
                    heapq.heappush(self._ends, (cluster.now + seconds, next(self._numbers), run))
            end_at = self._ends[0][0] if self._ends else until
            if cluster.timer_at is not None and cluster.timer_at < min(end_at, until):
                cluster.now = max(cluster.now, cluster.timer_at)
                cluster.timer_at = None
                cluster.send(ev.TimerFired())
                continue
            if not self._ends or end_at > until:
                cluster.now = until
                return
            cluster.now = end_at
            _, _, due = heapq.heappop(self._ends)
            if isinstance(due, cmd.Run):
                self._end(due)
            else:
                due()

    def _end(self, run: cmd.Run) -> None:
        cluster = self.cluster
        if run not in cluster.runs:
            return
        if run.kind == OperationKind.OPTIM_STEP:
            self.steps[run.deployment] = self.steps.get(run.deployment, 0) + 1
        cluster.compute_s = self._seconds.get((run.deployment, run.kind), 0.0)
        cluster.execute(run, trainer_step=self.steps.get(run.deployment))
        on_end = self._on_end.pop(run.operation, None)
        if on_end is not None:
            on_end()


@dataclass(slots=True, kw_only=True)
class AsynchronousJob:
    """The controller and the rollout service of a job with a trainer and some rollouts."""

    clock: Clock
    name: str
    staleness: int
    skews: tuple[float, ...] = (1.0, 0.6, 0.3)
    """Part of the batch's time that each rollout generates."""
    pushes: bool = True
    """Whether each step's version is published once; otherwise each sync has its own publish."""
    trained: int = 0
    _generated: list[int] = field(default_factory=list)
    """Batches that each rollout has generated."""
    _held: list[int] = field(default_factory=list)
    """Version that each rollout holds."""
    _busy: list[bool] = field(default_factory=list)
    _published: int = 0
    _trains: bool = False

    def start(self) -> None:
        """Sync all rollouts, and begin to generate."""
        rollouts = len(self.skews)
        self._generated, self._busy = [0] * rollouts, [False] * rollouts
        self._held = [-1] * rollouts
        self._go_on()

    def _go_on(self) -> None:
        for rollout in range(len(self.skews)):
            if not self._busy[rollout]:
                self._use(rollout)
        if not self._trains and min(self._generated) > self.trained:
            self._train()

    def _use(self, rollout: int) -> None:
        batch, deployment = self._generated[rollout], f"{self.name}/r{rollout}"
        if self._held[rollout] < self._published:
            version = self._published

            def pulled() -> None:
                self._held[rollout], self._busy[rollout] = version, False
                self._go_on()

            self._busy[rollout] = True
            source = f"{self.name}/actor"
            name = f"{self.name}:p{rollout}.{version}"
            fields = {"source": source, "published": self.pushes and version > 0}
            self.clock.submit(name, deployment, "sync_weights", pulled, **fields)
        elif self._held[rollout] + self.staleness >= batch:

            def generated() -> None:
                self._generated[rollout] += 1
                self._busy[rollout] = False
                self._go_on()

            self._busy[rollout] = True
            # A part of the batch is a part of the time: kinds of operations have one duration.
            self.clock.submit(f"{self.name}:g{rollout}.{batch}", deployment, "generate", generated)

    def _train(self) -> None:
        self._trains = True
        actor, step = f"{self.name}/actor", self.trained

        def published() -> None:
            self.trained += 1
            self._published += 1
            self._trains = False
            self._go_on()

        self.clock.submit(f"{self.name}:f{step}", actor, "forward_backward", lambda: None)
        last = published if not self.pushes else (lambda: None)
        self.clock.submit(f"{self.name}:s{step}", actor, "optim_step", last)
        if self.pushes:
            self.clock.submit(f"{self.name}:v{step}", actor, "publish", published)
