"""One operation as the scheduler core knows it, from submission to the end of history."""

from dataclasses import dataclass
from typing import Final

from plexrl.ids import BlobRef, DeploymentId, FencingToken, GroupId, OperationId, TenantId
from plexrl.scheduler.state.machines.operation_states import OperationTrigger, next_state
from plexrl.wire.operations import OperationKind, OperationState

_PENDING: Final = OperationState.PENDING
_SAVE_CHECKPOINT: Final = OperationKind.SAVE_CHECKPOINT
_NO_TOKEN: Final = FencingToken(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed mutation, or checkpoint, that the controller has not acknowledged."""

    operation: OperationId
    deployment: DeploymentId
    """That the operation was submitted to; of a sync whose source failed, the source."""
    kind: OperationKind
    error_json: str
    """`PlexRLError.to_wire()` as JSON."""
    at: float

    @property
    def halts(self) -> bool:
        """Whether later work builds on what failed; a checkpoint only is not there."""
        return self.kind is not _SAVE_CHECKPOINT


@dataclass(slots=True, kw_only=True, init=False)
class Operation:
    """One operation from submission to the end of history.

    Made by every event or so, and so with an `__init__` by hand: the one that a dataclass writes
    takes two and a half times as long, and stays as it is where the rest is compiled.
    """

    operation: OperationId
    deployment: DeploymentId
    kind: OperationKind
    params_json: str
    payload: BlobRef | None
    tokens: int
    source: DeploymentId | None
    submitted_at: float
    deadline_at: float | None = None
    """Not to be begun later; absent: it can wait."""
    payload_bytes: int = 0
    payload_digest: str = ""
    is_counted: bool = False
    """Among the `InFlight` of its deployment and tenant."""
    internal: bool = False
    after: OperationId | None = None
    """Must be finished first (the publish of a sync)."""
    serves: OperationId | None = None
    """Of a publish: the sync it is made for."""
    state: OperationState = OperationState.PENDING
    seq: int = 0
    """Given at the first dispatch; kept over recoveries."""
    token: FencingToken = FencingToken(0)
    group: GroupId | None = None
    started_at: float | None = None
    finished_at: float | None = None
    queue_s: float | None = None
    """Waited, but for context switches."""
    switch_s: float = 0.0
    """Waited while its group was being switched to its deployment."""
    transfer_s: float = 0.0
    """Of its run: its payload's and result's way, the splitting and joining of them included."""
    compute_s: float | None = None
    result_bytes: int = 0
    gpu_seconds: float = 0.0
    """Held so far: seconds times GPUs."""
    expected_at: float | None = None
    """When it was expected to start, by the estimate made as it arrived; absent once it has."""
    caused_by: DeploymentId | None = None
    """Of an offload: who gets the group, waiting or expected, and pays; absent: nobody, as in a
    drain, and the deployment's own job pays."""
    paid_by: TenantId | None = None
    """Whose job that is: it may have ended, and been forgotten, when the offload is over."""
    is_aborted: bool = False
    """Its early end has been asked for."""
    source_seq: int = 0
    """Of a sync: the version that was published for it."""
    source_step: int = 0
    """Of a sync: how many optimizer steps are in that version."""
    in_flight: bool = False
    """Of a sync: it may run beside generations."""
    ends_burst: bool = False
    """Nothing of its cycle comes after it."""
    result: BlobRef | None = None
    result_json: str = "{}"
    error_json: str | None = None
    index: int = 0
    """Place in the operation log, from 1."""
    is_logged: bool = False
    """In its deployment's replay log."""
    is_forgotten: bool = False
    """Out of the history, and kept only because a recovery may repeat it."""

    def __init__(
        self,
        operation: OperationId,
        deployment: DeploymentId,
        kind: OperationKind,
        submitted_at: float,
        *,
        internal: bool,
    ) -> None:
        self.operation = operation
        self.deployment = deployment
        self.kind = kind
        self.params_json = "{}"
        self.payload = None
        self.tokens = 0
        self.source = None
        self.submitted_at = submitted_at
        self.deadline_at = None
        self.payload_bytes = 0
        self.payload_digest = ""
        self.is_counted = False
        self.internal = internal
        self.after = None
        self.serves = None
        self.state = _PENDING
        self.seq = 0
        self.token = _NO_TOKEN
        self.group = None
        self.started_at = None
        self.finished_at = None
        self.queue_s = None
        self.switch_s = 0.0
        self.transfer_s = 0.0
        self.compute_s = None
        self.result_bytes = 0
        self.gpu_seconds = 0.0
        self.expected_at = None
        self.caused_by = None
        self.paid_by = None
        self.is_aborted = False
        self.source_seq = 0
        self.source_step = 0
        self.in_flight = False
        self.ends_burst = False
        self.result = None
        self.result_json = "{}"
        self.error_json = None
        self.index = 0
        self.is_logged = False
        self.is_forgotten = False


def change_operation(operation: Operation, trigger: OperationTrigger) -> None:
    """Move the operation along its table.

    Raises:
        IllegalTransitionError: the table has no such pair.
    """
    operation.state = next_state(operation.state, trigger)
