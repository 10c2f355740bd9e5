"""What the scheduler core can be told. Past tense, plain values, each journalled before it counts.

Every event round-trips through `CODEC`, and a journal of (event, now) pairs replayed into a new
core gives the same state and the same commands.
"""

import msgspec

from plexrl.ids import (
    BlobRef,
    DeploymentId,
    FencingToken,
    JobId,
    NodeId,
    OperationId,
    RouterId,
    TenantId,
)
from plexrl.scheduler.state.demand import DemandTrace
from plexrl.wire.codec import Codec, restore_annotations
from plexrl.wire.operations import OperationKind

restore_annotations(DemandTrace)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""


class SchedulerStarted(Event, frozen=True, kw_only=True):
    """A scheduler process took over this journal; all its connections are yet to come."""

    settings_json: str = ""
    """The core's settings from here on, so that a replay decides as this process did; empty in
    journals of before they were kept: whatever is in force stays so."""


class NodeJoined(Event, frozen=True, kw_only=True):
    """A node agent connected, for the first time or again."""

    node: NodeId
    gpus: int
    gpu_memory_bytes: int
    """Per GPU."""
    host_memory_bytes: int
    """Bound of the node's host tier."""
    statemanager: str
    """Address of the node's StateManager: a Unix socket path."""
    workers: tuple["WorkerSeen", ...] = ()
    """Worker processes that the agent already runs."""
    states: tuple[DeploymentId, ...] = ()
    """Deployments whose state the node's StateManager holds."""
    node_type: str = ""
    """What the operator calls such nodes, as `h200`."""
    block: str = ""
    """Where it stands in the topology, as `row1/rack3`; nodes of one block are near each other."""
    nvme_bytes: int = 0
    """Bound of the node's NVMe tier."""


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One living worker process, as an agent reports it on joining."""

    deployment: DeploymentId
    rank: int
    incarnation: int
    address: str


class NodeLost(Event, frozen=True, kw_only=True):
    """The agent's connection ended and its grace period passed; its workers count as dead."""

    node: NodeId


class RouterJoined(Event, frozen=True, kw_only=True):
    """A router connected, for the first time or again."""

    router: RouterId


class RouterLost(Event, frozen=True, kw_only=True):
    """A router's connection ended."""

    router: RouterId


class TenantCreated(Event, frozen=True, kw_only=True):
    """A tenant may submit jobs from now on."""

    tenant: TenantId
    key_digest: str
    """Hex SHA-256 of the tenant's API key; the key itself is stored nowhere."""
    is_operator: bool = False


class ApiKeyAdded(Event, frozen=True, kw_only=True):
    """A tenant got one more API key; those it had stay valid."""

    tenant: TenantId
    key_digest: str
    """Hex SHA-256 of the key."""


class ApiKeyRevoked(Event, frozen=True, kw_only=True):
    """An API key of a tenant is not valid any more."""

    tenant: TenantId
    key: str
    """Its id: the first characters of its digest."""


class TenantConfigured(Event, frozen=True, kw_only=True):
    """An operator set a tenant's weight, quotas and highest priority; None: no limit."""

    tenant: TenantId
    weight: float
    jobs_max: int | None
    gpus_max: int | None
    gpu_seconds_max: float | None
    priority_max: int = 0
    live_jobs_max: int | None = None
    checkpoints_max: int | None = None
    checkpoint_bytes_max: int | None = None


class NodeDrainChanged(Event, frozen=True, kw_only=True):
    """An operator wants a node empty, or has it back in use."""

    node: NodeId
    is_draining: bool


class JobSubmitted(Event, frozen=True, kw_only=True):
    """A controller asked for a job."""

    job: JobId
    tenant: TenantId
    name: str
    controller_timeout_s: float
    """Silence after which the controller counts as gone and the job as detached."""
    reattach_timeout_s: float
    """How long a detached job waits to be re-attached before it is cancelled."""
    priority: int = 0
    """Class: higher goes first, in admission and on a group."""
    gang: int = 0
    """Deployments that get GPUs all at once or not at all; 0: each by itself."""
    expected_s: float = 0.0
    """Length by the user's word; 0: unknown."""
    controller: str = ""
    """Token of the controller that asked, chosen by itself; empty: it has none."""
    halts_on_failure: bool = False
    """A failed mutation halts its deployment until the controller acknowledges it. False in older
    journals: their events are replayed as they were decided."""


class ControllerSeen(Event, frozen=True, kw_only=True):
    """A heartbeat of the job's controller; re-attaches a detached job."""

    job: JobId
    controller: str = ""
    """Token of who said so. In this and other events: a token that is not that of the job's present
    controller is refused; empty is taken from anybody."""


class ControllerAttached(Event, frozen=True, kw_only=True):
    """A process became the controller of a live job; its former controller is fenced off."""

    job: JobId
    controller: str
    keep_gradients: bool = False
    """False: gradients that wait for a step are dropped, for the new controller may not know of
    them."""


class FailureAcknowledged(Event, frozen=True, kw_only=True):
    """The controller has taken note of a failure, which is named by an operation that failed of it,
    or by a deployment that it halts."""

    operation: OperationId | None = None
    deployment: DeploymentId | None = None
    controller: str = ""


class JobFinished(Event, frozen=True, kw_only=True):
    """The controller declared its job's end."""

    job: JobId
    outcome: str
    """`completed`, `failed` or `cancelled`."""
    reason: str = ""
    controller: str = ""


class DeploymentCreated(Event, frozen=True, kw_only=True):
    """A job asked for a logical model."""

    deployment: DeploymentId
    job: JobId
    kind: str
    """`train` or `rollout`."""
    workers: int
    """GPUs wanted: one worker process on each."""
    state_bytes: int
    """Device memory of all its state together."""
    exclusive: bool
    """Never shares its node group (always so for rollout)."""
    spec_json: str
    """What the worker needs to build the model; opaque to the core."""
    node_type: str = ""
    """Wanted; empty: any."""
    trace: DemandTrace | None = None
    """Its demand where the user knows it; it is placed by it at once."""
    controller: str = ""


class StateResidency(msgspec.Struct, frozen=True, kw_only=True):
    """Where a deployment's newest version lies on a node."""

    deployment: DeploymentId
    host_bytes: int
    nvme_bytes: int
    """Of what must come from NVMe, because host memory has no copy."""


class StateReported(Event, frozen=True, kw_only=True):
    """A node's StateManager has moved state between its tiers; what is not named is as it was."""

    node: NodeId
    states: tuple[StateResidency, ...]


class WorkerReady(Event, frozen=True, kw_only=True):
    """A worker process of this incarnation listens; no state is on its device yet."""

    deployment: DeploymentId
    rank: int
    incarnation: int
    address: str


class WorkerExited(Event, frozen=True, kw_only=True):
    """A worker process of this incarnation is dead."""

    deployment: DeploymentId
    rank: int
    incarnation: int
    reason: str
    """Exit code or signal, and the last line of its log where there is one."""
    code: str = ""
    """Of the error that ended it, where it could tell one."""


class StateMigrated(Event, frozen=True, kw_only=True):
    """A node's StateManager has fetched a version, or could not."""

    deployment: DeploymentId
    node: NodeId
    seq: int
    error: str = ""
    """Why not; empty: it has it."""
    code: str = ""
    """Of that error."""


class OperationSubmitted(Event, frozen=True, gc=False):
    """A controller asked for an operation."""

    operation: OperationId
    deployment: DeploymentId
    kind: OperationKind
    params_json: str
    payload: BlobRef | None = None
    """Its tensors, already durable; absent where the kind has none."""
    tokens: int = 0
    """Size of the work, for estimates: tokens of the batch, or most tokens to draw."""
    source: DeploymentId | None = None
    """For `sync_weights`: the train deployment to pull from."""
    payload_bytes: int = 0
    payload_digest: str = ""
    """Of its bytes: by it a repeated request is known, whose payload has a name of its own."""
    deadline_s: float | None = None
    """From now on; not begun by then, it ends with `DeadlineExceededError`. Absent: none."""
    in_flight: bool = False
    """For `sync_weights`: beside generations that run, instead of after them."""
    ends_burst: bool = False
    """The last of its cycle's, of a job whose rollouts are made elsewhere: the group may go to
    others at once, as after a publish."""
    controller: str = ""


class OperationCancelled(Event, frozen=True, kw_only=True):
    """A controller does not want an operation any more."""

    operation: OperationId
    controller: str = ""


class StateMoved(msgspec.Struct, frozen=True, kw_only=True):
    """What a WPG's load or offload moved."""

    bytes_moved: int
    """Of all ranks together."""
    tier: str
    """`host` or `nvme`: the lower of the tiers that a rank's state came from, or went to."""


class OperationFinished(Event, frozen=True, gc=False):
    """A WPG completed a run of an operation on all its ranks."""

    operation: OperationId
    token: FencingToken
    """Of the run's command; a report with another token is of an earlier run and is ignored."""
    compute_s: float
    """Seconds on the workers, the slowest rank's."""
    result: BlobRef | None = None
    result_json: str = "{}"
    """Small results and measurements; opaque to the core."""
    moved: StateMoved | None = None
    """Of a load or offload: absent where the workers said nothing of it."""
    transfer_s: float = 0.0
    """Of the run in the router, without `compute_s`: splitting, sending, joining, storing."""
    result_bytes: int = 0
    error_json: str = ""
    """`PlexRLError.to_wire()` as JSON, of a mutation that changed the state in another way than was
    asked, as a step that dropped its gradients. It is replayed like any other, and this is its
    outcome. Empty: it succeeded."""
    trainer_step: int | None = None
    """Optimizer steps in the weights that a step, a checkpoint or a sync has made, or that were
    published. Absent: the workers said nothing of it."""


class OperationFailed(Event, frozen=True, kw_only=True):
    """A run ended without completing."""

    operation: OperationId
    token: FencingToken
    error_json: str
    """`PlexRLError.to_wire()` as JSON."""
    state_intact: bool
    """True: the WPG's state is as before the operation, and the error is the caller's answer.
    False: a rank may have changed or be stuck; the WPG is restarted from its last complete
    state."""


class TimerFired(Event, frozen=True, kw_only=True):
    """The time of an earlier `SetTimer` has come."""


class ServiceResumed(Event, frozen=True, kw_only=True):
    """The scheduler takes events in again, after a time in which it could not. What was silent
    meanwhile could not be heard."""


CODEC: Codec[Event] = Codec(
    SchedulerStarted,
    NodeJoined,
    NodeLost,
    RouterJoined,
    RouterLost,
    TenantCreated,
    ApiKeyAdded,
    ApiKeyRevoked,
    TenantConfigured,
    NodeDrainChanged,
    JobSubmitted,
    ControllerSeen,
    ControllerAttached,
    FailureAcknowledged,
    JobFinished,
    DeploymentCreated,
    WorkerReady,
    WorkerExited,
    StateMigrated,
    StateReported,
    OperationSubmitted,
    OperationCancelled,
    OperationFinished,
    OperationFailed,
    TimerFired,
    ServiceResumed,
)
