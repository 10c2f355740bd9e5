"""The operations of a deployment: queued, running, and to be repeated after a loss."""

from dataclasses import dataclass, field

from plexrl.ids import OperationId
from plexrl.scheduler.state.deployment.replay_log import ReplayLog
from plexrl.scheduler.state.operation import Failure, Operation
from plexrl.wire.messages import AnyRun


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


@dataclass(slots=True, kw_only=True)
class Workload:
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
