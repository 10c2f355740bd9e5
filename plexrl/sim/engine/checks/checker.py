"""Checks the invariants of a simulated run from its events and commands. Pure.

* No over-commit: `plexrl.sim.engine.checks.occupancy`. At most one deployment runs operations on a
  GPU at a time, moves included, with its own state there.
* Conservation: every submitted operation completes exactly once, unless its workers were lost. A
  run takes as long as it reports, and all runs of a job take as long as its cycles were drawn.
* Causality: time never decreases. A run follows its submission and the start of its workers; a
  completion follows its run. A deployment's operations run in order. The fencing tokens of a GPU
  never decrease.
* The core's own invariants (`plexrl.scheduler.core.invariants`), every `CORE_CHECK_EVENTS` events.

The checker does not use the core's decision logic, and keeps no state of ended jobs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from plexrl.errors import InvariantError
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.operations.operations import MOVES, OWN_MARK
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.checks.occupancy import Allocation, Occupancy
from plexrl.sim.workload.scenario import Scenario
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind

__all__ = ["CORE_CHECK_EVENTS", "Checker", "InvariantError"]

CORE_CHECK_EVENTS = 5000

TOLERANCE = 1e-9
"""Relative tolerance of a time: clocks are sums of many floats."""
TOLERANCE_S = 1e-6

Invariant = Literal["over-commit", "conservation", "causality", "core"]


@dataclass(slots=True)
class _Run:
    command: cmd.Run
    began_at: float


@dataclass(slots=True)
class _Deployment:
    allocation: Allocation
    job: "_Job"
    number: int
    """Its number in `_Gpus`."""
    running: dict[str, _Run] = field(default_factory=dict)
    pending: deque[str] = field(default_factory=deque)
    """Operations that are submitted and not running, in order."""
    has_failed: bool = False
    """Whether its workers were ever lost, so that operations may run again."""


@dataclass(slots=True)
class _Job:
    name: str
    deployments: dict[str, _Deployment] = field(default_factory=dict)
    ran_s: float = 0.0
    """Run time of all completed operations, without repetitions."""
    drawn_s: float | None = None
    """Drawn run time of all reported cycles; absent if none was reported."""


class _Gpus:
    """What each GPU does: arrays by its number in `Occupancy`, in which a deployment is a number
    from 1; 0: none."""

    def __init__(self) -> None:
        self.token = np.zeros(0, dtype=np.int64)
        """Newest fencing token."""
        self.owner = np.zeros(0, dtype=np.int64)
        """Deployment that has the token."""
        self.runner = np.zeros(0, dtype=np.int64)
        """Deployment with operations in flight there."""
        self.resident = np.zeros(0, dtype=np.int64)
        """Deployment whose state is there."""

    def hold(self, places: NDArray[np.intp]) -> None:
        """Have entries for these numbers."""
        more = int(places.max()) + 1 - len(self.token)
        if more > 0:
            for name in ("token", "owner", "runner", "resident"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(more, dtype=np.int64)]))


class Checker:
    """Receives every event and then its commands.

    Raises `InvariantError` if an invariant is broken; the run is invalid from there on.
    """

    def __init__(self, scenario: Scenario, core: SchedulerCore | None = None) -> None:
        """`core`: also check the invariants of this core."""
        self._gpus = scenario.gpus
        self._control_s = scenario.control_s
        self._core = core
        self._now = 0.0
        self._events = 0
        self._jobs: dict[str, _Job] = {}
        self._deployments: dict[str, _Deployment] = {}
        self._occupancy = Occupancy(lambda what: self._broken("over-commit", what))
        self._gpu_states = _Gpus()
        self._created_count = 0
        self._running: dict[str, _Deployment] = {}
        """Deployment of each running operation."""

    def observe(self, event: ev.Event, commands: Sequence[cmd.Command], now: float) -> None:
        """Check an event and its commands."""
        self.event(event, now)
        self.commands(event, commands, now)

    def event(self, event: ev.Event, now: float) -> None:
        """Check an event that the core has accepted."""
        if now < self._now:
            self._broken("causality", f"{type(event).__name__} comes at {now!r}, in the past")
        self._now = now
        self._events += 1
        match event:
            case ev.OperationFinished():
                self._finished(event)
            case ev.OperationSubmitted():
                self._submitted(event)
            case ev.WorkerReady():
                self._worker_ready(event)
            case ev.OperationFailed():
                self._run_failed(event)
            case ev.WorkerExited():
                deployment = self._deployments.get(event.deployment)
                if deployment and deployment.allocation.incarnation == event.incarnation:
                    self._lost(deployment)
            case ev.NodeLost():
                for allocation in self._occupancy.node_lost(event.node):
                    self._lost(self._deployments[allocation.created.deployment])
            case ev.NodeJoined():
                self._node_joined(event)
            case ev.OperationCancelled(rows=None):
                for each in self._deployments.values():
                    if event.operation in each.pending:
                        each.pending.remove(event.operation)
            case ev.JobSubmitted():
                self._jobs.setdefault(event.job, _Job(event.job))
            case ev.DeploymentCreated():
                self._created(event)
            case ev.JobFinished():
                self._job_finished(event)
            case _:
                pass

    def commands(self, event: ev.Event, commands: Sequence[cmd.Command], now: float) -> None:
        """Check the commands that the core returned for `event`."""
        if now != self._now:
            self._broken("causality", f"the commands for {type(event).__name__} come at {now!r}")
        for command in commands:
            match command:
                case cmd.Run():
                    self._run(command)
                case cmd.LaunchWorkers():
                    self._launched(command)
                case cmd.StopWorkers():
                    self._stopped(command)
                case _:
                    pass
        if self._core is not None and self._events % CORE_CHECK_EVENTS == 0:
            self._check_core(self._core)

    def drawn(self, job: str, busy_s: float) -> None:
        """Record a drawn cycle of the job with so many seconds of runs."""
        known = self._jobs[job]
        known.drawn_s = (known.drawn_s or 0.0) + busy_s

    def job_failed(self, job: str) -> None:
        """Record that the core has ended the job."""
        known = self._jobs.get(job)
        if known is None:
            return
        if not any(deployment.has_failed for deployment in known.deployments.values()):
            self._broken("conservation", f"{job} failed although none of its workers was lost")
        self._forget(known)

    def finish(self, now: float) -> None:
        """Check that no job is left at the end of the run."""
        if now < self._now:
            self._broken("causality", f"the run ends at {now!r}, in the past")
        self._now = now
        for job in self._jobs.values():
            self._broken("conservation", f"the run is over but {job.name} has not ended")
        if self._core is not None:
            self._check_core(self._core)

    def _broken(self, invariant: Invariant, what: str) -> NoReturn:
        raise InvariantError(
            f"{invariant}: {what}; at {self._now!r} s, after {self._events} events. This is a bug "
            "that the same scenario reproduces: please report it",
            law=invariant,
            at_s=self._now,
            events=self._events,
        )

    def _check_core(self, core: SchedulerCore) -> None:
        try:
            core.check_invariants()
        except AssertionError as error:
            self._broken("core", str(error))

    # Events

    def _node_joined(self, event: ev.NodeJoined) -> None:
        self._occupancy.node_joined(event)
        if self._occupancy.gpus > self._gpus:
            self._broken("over-commit", f"with {event.node} the cluster has over {self._gpus} GPUs")

    def _created(self, event: ev.DeploymentCreated) -> None:
        if event.deployment in self._deployments:
            return
        job = self._jobs.get(event.job)
        if job is None:
            self._broken("causality", f"{event.deployment} belongs to unknown {event.job}")
        self._created_count += 1
        created = _Deployment(Allocation(event), job, self._created_count)
        job.deployments[event.deployment] = created
        self._deployments[event.deployment] = created

    def _submitted(self, event: ev.OperationSubmitted) -> None:
        if event.source is not None:
            publish = f"{event.operation}{OWN_MARK}publish"
            self._known(event.source, event.operation).pending.append(publish)
        deployment = self._known(event.deployment, event.operation)
        if event.operation in deployment.pending:
            self._broken("conservation", f"{event.operation} is submitted twice")
        deployment.pending.append(event.operation)

    def _worker_ready(self, event: ev.WorkerReady) -> None:
        allocation = self._known(event.deployment, f"worker {event.rank}").allocation
        if event.incarnation > allocation.incarnation:
            self._broken(
                "causality",
                f"incarnation {event.incarnation} of {event.deployment} is ready but "
                f"{allocation.incarnation} was launched",
            )
        if event.incarnation == allocation.incarnation and allocation.gpus:
            allocation.ready.add(event.rank)

    def _finished(self, event: ev.OperationFinished) -> None:
        deployment, run = self._ended(event.operation, event.token)
        command = run.command
        took_s = self._now - run.began_at
        computed_s = max(0.0, took_s - self._control_s)
        if abs(computed_s - event.compute_s) > TOLERANCE_S + TOLERANCE * self._now:
            self._broken(
                "conservation",
                f"{event.operation} reports {event.compute_s!r} s but ran {took_s!r} s",
            )
        if command.kind == OperationKind.LOAD:
            self._gpu_states.resident[deployment.allocation.places] = deployment.number
        elif command.kind == OperationKind.OFFLOAD:
            self._gpu_states.resident[deployment.allocation.places] = 0
        elif command.kind not in MOVES and not command.replay:
            self._deployments[command.deployment].job.ran_s += took_s
        if event.unfinished_rows:
            self._deployments[command.deployment].pending.appendleft(event.operation)

    def _run_failed(self, event: ev.OperationFailed) -> None:
        _, run = self._ended(event.operation, event.token)
        if not event.state_intact:
            self._lost(self._deployments[run.command.deployment])

    def _ended(self, operation: str, token: int) -> tuple[_Deployment, _Run]:
        deployment = self._running.pop(operation, None)
        if deployment is None:
            self._broken("causality", f"{operation} ends but does not run")
        run = deployment.running.pop(operation)
        if not deployment.running:
            self._gpu_states.runner[deployment.allocation.places] = 0
        if run.command.token != token:
            self._broken(
                "causality",
                f"{operation} ends under token {token} but runs under {run.command.token}",
            )
        return deployment, run

    def _lost(self, deployment: _Deployment) -> None:
        """Record a loss of workers, after which operations may run again."""
        deployment.has_failed = True
        self._interrupt(deployment)

    def _interrupt(self, deployment: _Deployment) -> None:
        """End its workers and return their operations to the queue."""
        allocation = deployment.allocation
        allocation.ready.clear()
        runs = [run.command for run in deployment.running.values()]
        deployment.running.clear()
        for command in runs:
            del self._running[command.operation]
        again = [
            command.operation
            for command in runs
            if command.kind not in MOVES and not command.replay
        ]
        deployment.pending.extendleft(reversed(again))
        places, gpus = allocation.places, self._gpu_states
        gpus.runner[places[gpus.runner[places] == deployment.number]] = 0
        gpus.resident[places[gpus.resident[places] == deployment.number]] = 0

    def _job_finished(self, event: ev.JobFinished) -> None:
        job = self._jobs.get(event.job)
        if job is None:
            return
        if event.outcome == "completed":
            for deployment in job.deployments.values():
                self._check_done(deployment)
            drawn_s = job.drawn_s
            if drawn_s is not None and abs(job.ran_s - drawn_s) > 1e-6 * max(1.0, drawn_s):
                self._broken(
                    "conservation",
                    f"{job.name} ran {job.ran_s!r} s but its cycles were drawn with {drawn_s!r} s",
                )
        self._forget(job)

    def _check_done(self, deployment: _Deployment) -> None:
        runs = [run.command for run in deployment.running.values()]
        left = [*deployment.pending]
        left += [command.operation for command in runs if command.kind not in MOVES]
        if left:
            self._broken(
                "conservation",
                f"{deployment.job.name} is completed but not {', '.join(left[:5])}",
            )

    def _forget(self, job: _Job) -> None:
        for name, each in job.deployments.items():
            self._interrupt(each)
            self._occupancy.left(each.allocation)
            del self._deployments[name]
        del self._jobs[job.name]

    # Commands

    def _launched(self, command: cmd.LaunchWorkers) -> None:
        deployment = self._known(command.deployment, "its workers")
        self._occupancy.launched(deployment.allocation, command)
        self._gpu_states.hold(deployment.allocation.places)

    def _stopped(self, command: cmd.StopWorkers) -> None:
        deployment = self._deployments.get(command.deployment)
        if deployment is None or command.incarnation < deployment.allocation.incarnation:
            return
        if not deployment.has_failed:
            self._check_nothing_runs(deployment)
        self._interrupt(deployment)
        self._occupancy.left(deployment.allocation)

    def _check_nothing_runs(self, deployment: _Deployment) -> None:
        name = deployment.allocation.created.deployment
        for operation in deployment.running:
            self._broken(
                "conservation", f"{name} is stopped while {operation} runs without a lost worker"
            )

    def _run(self, command: cmd.Run) -> None:
        operation = command.operation
        deployment = self._known(command.deployment, operation)
        allocation = deployment.allocation
        before = deployment.running.get(operation)
        if before is not None and before.command.token == command.token:
            # A repeated command: the shell reports the result of the first run.
            return
        if not allocation.is_ready:
            self._broken("causality", f"{operation} runs before all its workers are ready")
        self._check_exclusive(deployment, command)
        self._check_token(deployment, command)
        self._check_state(deployment, command)
        self._check_order(deployment, command)
        deployment.running[operation] = _Run(command, self._now)
        self._gpu_states.runner[allocation.places] = deployment.number
        self._running[operation] = deployment

    def _check_exclusive(self, deployment: _Deployment, command: cmd.Run) -> None:
        runner = self._gpu_states.runner[deployment.allocation.places]
        if ((runner != 0) & (runner != deployment.number)).any():
            self._broken("over-commit", f"{command.operation} runs on GPUs that another one uses")
        for run in deployment.running.values():
            kinds = {command.kind, run.command.kind}
            if not kinds <= {OperationKind.GENERATE, OperationKind.SYNC_WEIGHTS}:
                self._broken(
                    "over-commit", f"{command.operation} runs beside {run.command.operation}"
                )

    def _check_token(self, deployment: _Deployment, command: cmd.Run) -> None:
        gpus, places, number = self._gpu_states, deployment.allocation.places, deployment.number
        newest = int(gpus.token[places].max())
        if command.token < newest:
            self._broken(
                "causality",
                f"{command.operation} runs under token {command.token} on a GPU at {newest}",
            )
        is_newer = command.token > newest
        if command.kind == OperationKind.OFFLOAD:
            # An offload uses the next holder's token, which fences the former holder off.
            if not is_newer:
                self._broken(
                    "causality", f"{command.operation} reuses a token: {command.token} is not new"
                )
            gpus.token[places], gpus.owner[places] = command.token, 0
            return
        owner = gpus.owner[places]
        if not is_newer and ((owner != 0) & (owner != number)).any():
            self._broken("causality", f"{command.operation} runs under the token of another one")
        gpus.token[places], gpus.owner[places] = command.token, number

    def _check_state(self, deployment: _Deployment, command: cmd.Run) -> None:
        wanted = 0 if command.kind == OperationKind.LOAD else deployment.number
        if (self._gpu_states.resident[deployment.allocation.places] != wanted).any():
            self._broken(
                "over-commit",
                f"{command.operation} runs with the state of another one, or none, on its GPUs",
            )

    def _check_order(self, deployment: _Deployment, command: cmd.Run) -> None:
        operation, pending = command.operation, deployment.pending
        if command.kind in MOVES:
            return
        if command.replay:
            if not deployment.has_failed:
                self._broken("conservation", f"{operation} is repeated although no worker was lost")
            return
        if operation not in pending:
            self._broken(
                "conservation", f"{operation} runs but was not submitted, or has run already"
            )
        if pending[0] != operation:
            self._broken("causality", f"{operation} overtakes {pending[0]}")
        pending.popleft()

    def _known(self, deployment: str, what: str) -> _Deployment:
        found = self._deployments.get(deployment)
        if found is None:
            self._broken("causality", f"{what} belongs to unknown {deployment}")
        return found
