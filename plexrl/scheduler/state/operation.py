"""One operation in the scheduler core, from submission until it leaves the history."""

from dataclasses import dataclass
from typing import Final

import msgspec

from plexrl.errors import PlexRLError
from plexrl.ids import BlobRef, DeploymentId, FencingToken, GroupId, OperationId, TenantId
from plexrl.scheduler.state.machines.operation_states import AFTER, OperationTrigger, next_state
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.operations import OperationKind, OperationParams, OperationState

_PENDING: Final = OperationState.PENDING
_SAVE_CHECKPOINT: Final = OperationKind.SAVE_CHECKPOINT
_NO_TOKEN: Final = FencingToken(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed mutation or checkpoint that the controller has not acknowledged."""

    operation: OperationId
    deployment: DeploymentId
    """Deployment of the operation; for a sync whose source failed, the source."""
    kind: OperationKind
    error: ErrorView
    at: float

    @property
    def halts(self) -> bool:
        """Whether later work depends on what failed; nothing depends on a checkpoint."""
        return self.kind is not _SAVE_CHECKPOINT


@dataclass(slots=True, kw_only=True, init=False)
class Operation:
    """One operation.

    Operations are made often, so `__init__` is written by hand: the generated one takes 2.5 times
    as long, and is never compiled.
    """

    operation: OperationId
    deployment: DeploymentId
    kind: OperationKind
    params: OperationParams | None
    """None: its kind has none, or it is simulated."""
    payload: BlobRef | None
    tokens: int
    source: DeploymentId | None
    submitted_at: float
    deadline_at: float | None = None
    """It does not start after this time; a running generation is stopped. None: no deadline."""
    payload_bytes: int = 0
    payload_digest: str = ""
    payload_lost_at: float | None = None
    """When its payload was first found to be damaged or missing; None: it was not, or it was sent
    again."""
    is_counted: bool = False
    """Counted in the `InFlight` of its deployment and tenant."""
    internal: bool = False
    after: OperationId | None = None
    """Operation that must finish first (the publish of a sync)."""
    serves: OperationId | None = None
    """For a publish: the sync that it is made for."""
    state: OperationState = OperationState.PENDING
    seq: int = 0
    """Assigned at the first dispatch, and kept in recoveries."""
    token: FencingToken = FencingToken(0)
    group: GroupId | None = None
    also_on: tuple[GroupId, ...] = ()
    """The further groups of its last run, if it had several."""
    is_stored: bool = False
    """Its first run was on the stored state, beside the group's holder."""
    started_at: float | None = None
    finished_at: float | None = None
    queue_s: float | None = None
    """Waiting time without context switches."""
    switch_s: float = 0.0
    """Waiting time during context switches to its deployment."""
    transfer_s: float = 0.0
    """Time in the router: transfer, splitting and joining of payload and result."""
    compute_s: float | None = None
    result_bytes: int = 0
    gpu_seconds: float = 0.0
    """Seconds times GPUs of its present run, so far; 0 once they are billed or discarded."""
    expected_at: float | None = None
    """Expected start, estimated at its arrival; None once it has started."""
    expected_within: tuple[float, float] | None = None
    """Earliest and latest expected start, with `expected_at`."""
    caused_by: DeploymentId | None = None
    """For a move: another deployment whose job is billed, because it gets the group, or had it as a
    filler; None: the deployment's own job is billed."""
    paid_by: TenantId | None = None
    """Tenant of that job, which may have ended and been dropped before the offload is over."""
    is_aborted: bool = False
    """Its early end was requested."""
    stopped_rows: tuple[int, ...] = ()
    """For a generation: rows whose early end was requested, in ascending order."""
    is_interrupted: bool = False
    """For a generation: its present run was told to stop, and is continued in another one."""
    interruptions: int = 0
    """For a generation: runs that ended so."""
    partial: BlobRef | None = None
    """For a generation: what its interrupted runs drew."""
    source_seq: int = 0
    """For a sync: the version that was published for it."""
    source_step: int = 0
    """For a sync: number of optimizer steps in that version."""
    publishes: int = 0
    """For a sync: how often its source published again, because the version was gone."""
    in_flight: bool = False
    """For a sync: it may run during generations."""
    published: bool = False
    """For a sync: it pulls what the newest `publish` operation of its source made, if there is such
    a version, instead of a publish of its own."""
    needs_load: bool = False
    """For a checkpoint or a step: the stored state was not enough, so its next run follows a
    load."""
    ends_burst: bool = False
    """It is the last operation of its cycle."""
    result: BlobRef | None = None
    result_json: str = "{}"
    """As in `OperationFinished`."""
    error: ErrorView | None = None
    index: int = 0
    """Index in the operation log, from 1."""
    is_logged: bool = False
    """It is in its deployment's replay log."""
    is_forgotten: bool = False
    """It has left the history, and is kept only because a recovery may repeat it."""

    @property
    def pulls_newest(self) -> bool:
        """Whether it is a sync of the newest published version, without a publish of its own."""
        return self.published and self.after is None

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
        self.params = None
        self.payload = None
        self.tokens = 0
        self.source = None
        self.submitted_at = submitted_at
        self.deadline_at = None
        self.payload_bytes = 0
        self.payload_digest = ""
        self.payload_lost_at = None
        self.is_counted = False
        self.internal = internal
        self.after = None
        self.serves = None
        self.state = _PENDING
        self.seq = 0
        self.token = _NO_TOKEN
        self.group = None
        self.also_on = ()
        self.is_stored = False
        self.started_at = None
        self.finished_at = None
        self.queue_s = None
        self.switch_s = 0.0
        self.transfer_s = 0.0
        self.compute_s = None
        self.result_bytes = 0
        self.gpu_seconds = 0.0
        self.expected_at = None
        self.expected_within = None
        self.caused_by = None
        self.paid_by = None
        self.is_aborted = False
        self.stopped_rows = ()
        self.is_interrupted = False
        self.interruptions = 0
        self.partial = None
        self.source_seq = 0
        self.source_step = 0
        self.publishes = 0
        self.in_flight = False
        self.published = False
        self.needs_load = False
        self.ends_burst = False
        self.result = None
        self.result_json = "{}"
        self.error = None
        self.index = 0
        self.is_logged = False
        self.is_forgotten = False


def error_view(error: PlexRLError) -> ErrorView:
    """`error` as a journal or a snapshot gives it back: its details may hold what JSON does not."""
    return msgspec.json.decode(msgspec.json.encode(error.to_wire()), type=ErrorView)


def change_operation(operation: Operation, trigger: OperationTrigger) -> None:
    """Move the operation along its table.

    Raises:
        IllegalTransitionError: the table has no such pair.
    """
    # Each event has one or two of these transitions, so a legal one is looked up without a call.
    after = AFTER[trigger].get(operation.state)
    operation.state = next_state(operation.state, trigger) if after is None else after
