"""Checks the invariants of a simulated run from its events and commands. Pure.

* No over-commit: `plexrl.sim.engine.checks.occupancy`. At most one deployment runs operations on a
  group at a time, moves included, with its own state on the GPUs.
* Conservation: every submitted operation completes exactly once, unless its workers were lost. A
  run takes as long as it reports, and all runs of a job take as long as its cycles were drawn.
* Causality: time never decreases. A run follows its submission and the start of its workers; a
  completion follows its run. A deployment's operations run in order. Fencing tokens never decrease.
* The core's own invariants (`plexrl.scheduler.core.invariants`), every `CORE_CHECK_EVENTS` events.

The checker does not use the core's decision logic, and keeps no state of ended jobs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

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

TOKENS_MAX = 4096
"""Dissolved groups whose fencing tokens are kept: a group may be formed again."""

Invariant = Literal["over-commit", "conservation", "causality", "core"]


@dataclass(slots=True)
class _Run:
    command: cmd.Run
    began_at: float


@dataclass(slots=True)
class _Deployment:
    allocation: Allocation
    job: "_Job"
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


@dataclass(slots=True)
class _Lock:
    """The lock of a group."""

    token: int = 0
    owner: str = ""
    """Deployment that holds the token."""
    running: dict[str, _Run] = field(default_factory=dict)
    resident: str | None = None
    """Deployment whose state is on the GPUs; absent: none."""


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
        self._locks: dict[str, _Lock] = {}
        self._former_tokens: dict[str, int] = {}
        self._running: dict[str, _Lock] = {}
        """Lock under which each running operation runs."""

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
        if not any(each.has_failed for each in known.deployments.values()):
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
        created = _Deployment(Allocation(event), job)
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
        if event.incarnation == allocation.incarnation and allocation.group is not None:
            allocation.ready.add(event.rank)

    def _finished(self, event: ev.OperationFinished) -> None:
        lock, run = self._ended(event.operation, event.token)
        command = run.command
        took_s = self._now - run.began_at
        computed_s = max(0.0, took_s - self._control_s)
        if abs(computed_s - event.compute_s) > TOLERANCE_S + TOLERANCE * self._now:
            self._broken(
                "conservation",
                f"{event.operation} reports {event.compute_s!r} s but ran {took_s!r} s",
            )
        if command.kind == OperationKind.LOAD:
            lock.resident = command.deployment
        elif command.kind == OperationKind.OFFLOAD:
            lock.resident = None
        elif command.kind not in MOVES and not command.replay:
            self._deployments[command.deployment].job.ran_s += took_s
        if event.unfinished_rows:
            self._deployments[command.deployment].pending.appendleft(event.operation)

    def _run_failed(self, event: ev.OperationFailed) -> None:
        _, run = self._ended(event.operation, event.token)
        if not event.state_intact:
            self._lost(self._deployments[run.command.deployment])

    def _ended(self, operation: str, token: int) -> tuple[_Lock, _Run]:
        lock = self._running.pop(operation, None)
        if lock is None:
            self._broken("causality", f"{operation} ends but does not run")
        run = lock.running.pop(operation)
        if run.command.token != token:
            self._broken(
                "causality",
                f"{operation} ends under token {token} but runs under {run.command.token}",
            )
        return lock, run

    def _lost(self, deployment: _Deployment) -> None:
        """Record a loss of workers, after which operations may run again."""
        deployment.has_failed = True
        self._interrupt(deployment)

    def _interrupt(self, deployment: _Deployment) -> None:
        """End its workers and return their operations to the queue."""
        allocation = deployment.allocation
        allocation.ready.clear()
        lock = None if allocation.group is None else self._locks.get(allocation.group)
        if lock is None:
            return
        name = allocation.created.deployment
        runs = [run.command for run in lock.running.values() if run.command.deployment == name]
        for command in runs:
            del lock.running[command.operation], self._running[command.operation]
        again = [
            command.operation
            for command in runs
            if command.kind not in MOVES and not command.replay
        ]
        deployment.pending.extendleft(reversed(again))
        if lock.resident == name or any(command.kind in MOVES for command in runs):
            lock.resident = None

    def _job_finished(self, event: ev.JobFinished) -> None:
        job = self._jobs.get(event.job)
        if job is None:
            return
        if event.outcome == "completed":
            for each in job.deployments.values():
                self._check_done(each)
            drawn_s = job.drawn_s
            if drawn_s is not None and abs(job.ran_s - drawn_s) > 1e-6 * max(1.0, drawn_s):
                self._broken(
                    "conservation",
                    f"{job.name} ran {job.ran_s!r} s but its cycles were drawn with {drawn_s!r} s",
                )
        self._forget(job)

    def _check_done(self, deployment: _Deployment) -> None:
        allocation = deployment.allocation
        left = list(deployment.pending)
        lock = None if allocation.group is None else self._locks.get(allocation.group)
        if lock is not None:
            left += [
                run.command.operation
                for run in lock.running.values()
                if run.command.deployment == allocation.created.deployment
                and run.command.kind not in MOVES
            ]
        if left:
            self._broken(
                "conservation",
                f"{deployment.job.name} is completed but not {', '.join(left[:5])}",
            )

    def _forget(self, job: _Job) -> None:
        for name, each in job.deployments.items():
            self._interrupt(each)
            self._leave(each)
            del self._deployments[name]
        del self._jobs[job.name]

    def _leave(self, deployment: _Deployment) -> None:
        group = deployment.allocation.group
        if group is None:
            return
        was_alone = self._occupancy.is_alone(deployment.allocation)
        self._occupancy.left(deployment.allocation)
        if was_alone and group in self._locks:
            self._former_tokens[group] = self._locks.pop(group).token
            if len(self._former_tokens) > TOKENS_MAX:
                del self._former_tokens[next(iter(self._former_tokens))]

    # Commands

    def _launched(self, command: cmd.LaunchWorkers) -> None:
        deployment = self._known(command.deployment, "its workers")
        self._occupancy.launched(deployment.allocation, command)
        if command.group not in self._locks:
            token = self._former_tokens.pop(command.group, 0)
            self._locks[command.group] = _Lock(token=token)

    def _stopped(self, command: cmd.StopWorkers) -> None:
        deployment = self._deployments.get(command.deployment)
        if deployment is None or command.incarnation < deployment.allocation.incarnation:
            return
        if not deployment.has_failed:
            self._check_nothing_runs(deployment)
        self._interrupt(deployment)
        self._leave(deployment)

    def _check_nothing_runs(self, deployment: _Deployment) -> None:
        group, name = deployment.allocation.group, deployment.allocation.created.deployment
        lock = None if group is None else self._locks.get(group)
        for run in () if lock is None else lock.running.values():
            if run.command.deployment == name:
                self._broken(
                    "conservation",
                    f"{name} is stopped while {run.command.operation} runs without a lost worker",
                )

    def _run(self, command: cmd.Run) -> None:
        operation = command.operation
        deployment = self._known(command.deployment, operation)
        allocation = deployment.allocation
        if allocation.group != command.group:
            self._broken(
                "over-commit", f"{operation} runs on {command.group}, not {allocation.group}"
            )
        lock = self._locks[command.group]
        before = lock.running.get(operation)
        if before is not None and before.command.token == command.token:
            # A repeated command: the shell reports the result of the first run.
            return
        if not allocation.is_ready:
            self._broken("causality", f"{operation} runs before all its workers are ready")
        self._check_exclusive(lock, command)
        self._check_token(lock, command)
        self._check_state(lock, command)
        self._check_order(deployment, command)
        lock.running[operation] = _Run(command, self._now)
        self._running[operation] = lock

    def _check_exclusive(self, lock: _Lock, command: cmd.Run) -> None:
        for run in lock.running.values():
            other = run.command
            both_generate = {command.kind, other.kind} <= {
                OperationKind.GENERATE,
                OperationKind.SYNC_WEIGHTS,
            }
            if other.deployment != command.deployment or not both_generate:
                self._broken(
                    "over-commit",
                    f"{command.operation} runs on {command.group} beside {other.operation}",
                )

    def _check_token(self, lock: _Lock, command: cmd.Run) -> None:
        if command.token < lock.token:
            self._broken(
                "causality",
                f"{command.operation} runs under token {command.token} of {command.group}, which "
                f"was at {lock.token}",
            )
        is_newer = command.token > lock.token
        if command.kind == OperationKind.OFFLOAD:
            # An offload uses the next holder's token, which fences the former holder off.
            if not is_newer:
                self._broken(
                    "causality", f"{command.operation} reuses a token: {command.token} is not new"
                )
            lock.token, lock.owner = command.token, ""
            return
        if lock.owner not in ("", command.deployment) and not is_newer:
            self._broken("causality", f"{command.operation} runs under the token of {lock.owner}")
        lock.token, lock.owner = command.token, command.deployment

    def _check_state(self, lock: _Lock, command: cmd.Run) -> None:
        wanted = None if command.kind == OperationKind.LOAD else command.deployment
        if lock.resident != wanted:
            self._broken(
                "over-commit",
                f"{command.operation} runs with the state of {lock.resident or 'nobody'} on the "
                f"GPUs of {command.group}",
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
