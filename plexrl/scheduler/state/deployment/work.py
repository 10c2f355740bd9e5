"""The operations of a deployment: queued, running, and to be repeated after a loss."""

from collections.abc import Collection
from dataclasses import dataclass, field

from plexrl.ids import OperationId
from plexrl.scheduler.state.deployment.replay_log import ReplayLog
from plexrl.scheduler.state.operation import Failure, Operation
from plexrl.wire.messages import AnyRun

NEWEST = 0.25
"""Weight of the newest end in the rate at which operations end."""


@dataclass(slots=True, kw_only=True)
class InFlight:
    """Accepted operations that are not finished, and the rate at which they end."""

    operations: int = 0
    payload_bytes: int = 0
    ended_at: float | None = None
    """When an operation last ended."""
    gap_s: float | None = None
    """Average time between two ends, while there are operations."""
    bytes_each: float = 0.0
    """Average payload of an operation."""

    def add(self, payload_bytes: int) -> None:
        """An operation was accepted."""
        self.operations += 1
        self.payload_bytes += payload_bytes

    def remove(self, operation: Operation, now: float) -> None:
        """An operation has ended."""
        self.operations -= 1
        payload_bytes = operation.payload_bytes
        if payload_bytes:
            self.payload_bytes -= payload_bytes
        # Idle time does not count for the rate.
        since, ended_at = operation.submitted_at, self.ended_at
        if ended_at is not None and ended_at > since:
            since = ended_at
        gap_s = now - since if now > since else 0.0
        self.ended_at = now
        known_s = self.gap_s
        if known_s is None:
            self.gap_s, self.bytes_each = gap_s, float(payload_bytes)
            return
        self.gap_s = known_s + NEWEST * (gap_s - known_s)
        if payload_bytes or self.bytes_each:
            self.bytes_each += NEWEST * (payload_bytes - self.bytes_each)


@dataclass(slots=True, kw_only=True)
class DeploymentWork:
    """The work of a deployment."""

    queue: list[OperationId] = field(default_factory=list)
    running: dict[OperationId, AnyRun] = field(default_factory=dict)
    waiting_gradients: int = 0
    """Batches whose gradients are computed and wait for a step."""
    unacknowledged: list[Failure] = field(default_factory=list)
    """Failures that halt its mutations, syncs and checkpoints until the controller acknowledges
    them, oldest first."""
    trainer_step: int = 0
    """Optimizer steps in its weights; for a rollout or reference, the trainer's steps in the
    weights that were synced or loaded last."""
    in_flight: InFlight = field(default_factory=InFlight)
    replay: ReplayLog = field(default_factory=ReplayLog)
    watch_at: float = 0.0
    """When its runs are looked at next (`operations.deadlines`); 0: nothing runs."""

    def sent_at(self, operation: Operation) -> float | None:
        """When its operation or move was last sent to the workers; None: it waits. A repetition
        leaves `started_at`, which is of the first run."""
        run = self.running.get(operation.operation)
        if run is not None and run.replay:
            return self.replay.sent_at
        return operation.started_at

    def enqueue(self, place: int, operation: OperationId) -> None:
        """An operation waits at this index of the queue."""
        self.queue.insert(place, operation)

    def take_head(self) -> None:
        """The first operation of the queue is started."""
        del self.queue[0]

    def remove(self, place: int) -> None:
        """The operation at this index of the queue fails, or was cancelled."""
        del self.queue[place]

    @property
    def new_runs(self) -> list[OperationId]:
        """The operations that run, and are no repetitions of what was completed."""
        return [name for name, command in self.running.items() if not command.replay]

    def begin_run(self, command: AnyRun) -> None:
        """A run was sent to the workers."""
        self.running[command.operation] = command

    def end_run(self, operation: OperationId) -> AnyRun | None:
        """A run has ended. Returns it; None: there is none of this operation."""
        return self.running.pop(operation, None)

    def end_runs(self) -> None:
        """The workers were stopped."""
        self.running.clear()

    def drop(self) -> None:
        """The deployment has ended: nothing runs or waits."""
        self.running.clear()
        self.queue.clear()

    def count_gradients(self, batches: int) -> None:
        """Gradients of so many batches wait for a step."""
        self.waiting_gradients = batches

    def advance_to(self, trainer_step: int) -> None:
        """Its weights have so many optimizer steps."""
        self.trainer_step = trainer_step

    def fail(self, failure: Failure) -> None:
        """A failure awaits its acknowledgement."""
        self.unacknowledged.append(failure)

    def acknowledge(self, operations: Collection[OperationId]) -> None:
        """The failures of these operations are acknowledged."""
        self.unacknowledged = [
            failure for failure in self.unacknowledged if failure.operation not in operations
        ]

    def watch(self, at: float) -> None:
        """Its runs are looked at then; 0: nothing runs."""
        self.watch_at = at
