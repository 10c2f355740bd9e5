"""Events of the scheduler core: past tense, plain values, journalled before they are handled.

Each event round-trips through `CODEC`. A journal of (event, now) pairs, replayed into a new core,
gives the same state and the same commands.
"""

from typing import Any

import msgspec

from plexrl.access import AccessRole, KeyScope
from plexrl.ids import (
    BlobRef,
    DeploymentId,
    JobId,
    NodeId,
    OperationId,
    RouterId,
    TenantId,
)
from plexrl.model.memory.device_memory import DeviceMemory
from plexrl.scheduler.state.demand.job_quote import JobQuote
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.messages.earlier import EARLIER_FIELDS, upgrade_event
from plexrl.wire.codec import Codec, restore_annotations
from plexrl.wire.messages.reports import (
    Event as Event,
)
from plexrl.wire.messages.reports import (
    NodeJoined as NodeJoined,
)
from plexrl.wire.messages.reports import (
    OperationFailed as OperationFailed,
)
from plexrl.wire.messages.reports import (
    OperationFinished as OperationFinished,
)
from plexrl.wire.messages.reports import (
    RouterJoined as RouterJoined,
)
from plexrl.wire.messages.reports import (
    StateMoved as StateMoved,
)
from plexrl.wire.messages.reports import (
    StateReported as StateReported,
)
from plexrl.wire.messages.reports import (
    StateResidency as StateResidency,
)
from plexrl.wire.messages.reports import (
    WorkerExited as WorkerExited,
)
from plexrl.wire.messages.reports import (
    WorkerReady as WorkerReady,
)
from plexrl.wire.messages.reports import (
    WorkerSeen as WorkerSeen,
)
from plexrl.wire.messages.run_views import ForkView
from plexrl.wire.operations import CheckpointSchedule, OperationKind, OperationParams

restore_annotations(DemandTrace)


class SchedulerStarted(Event, frozen=True, kw_only=True):
    """A scheduler process took over this journal; it has no connections yet."""

    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """The core's settings from this event on, so that a replay makes the same decisions: fields of
    `SchedulerConfig` as plain values, of which this version may not know all. Empty in old
    journals: the present settings stay in force."""


class NodeLost(Event, frozen=True, kw_only=True):
    """The agent's connection ended and its grace period is over; its workers count as dead."""

    node: NodeId


class RouterLost(Event, frozen=True, kw_only=True):
    """A router's connection ended."""

    router: RouterId


class TenantCreated(Event, frozen=True, kw_only=True):
    """A tenant was created, and may submit jobs."""

    tenant: TenantId
    key_digest: str
    """Hex SHA-256 of the tenant's API key; the key itself is stored nowhere."""
    is_operator: bool = False
    is_admin: bool = False
    """The key is one of an admin of the tenant, not of a member."""


class ApiKeyAdded(Event, frozen=True, kw_only=True):
    """A tenant got one more API key; its other keys stay valid."""

    tenant: TenantId
    key_digest: str
    """Hex SHA-256 of the key."""


class ApiKeyGranted(Event, frozen=True, kw_only=True):
    """A tenant got an API key with a role, a user, a name, a scope or an end of its own."""

    tenant: TenantId
    key_digest: str
    """Hex SHA-256 of the key."""
    role: AccessRole
    user: str = ""
    name: str = ""
    scope: KeyScope = KeyScope.ALL
    expires_at: float = 0.0
    """0: never."""


class ApiKeyRevoked(Event, frozen=True, kw_only=True):
    """An API key of a tenant became invalid."""

    tenant: TenantId
    key: str
    """Id of the key: the first characters of its digest."""


class JobKeyAdded(Event, frozen=True, kw_only=True):
    """A job got an API key of its own, which opens only the job's OpenAI-compatible endpoints."""

    job: JobId
    key_digest: str
    """Hex SHA-256 of the key."""
    controller: str = ""


class JobKeysRevoked(Event, frozen=True, kw_only=True):
    """All API keys of a job became invalid."""

    job: JobId
    controller: str = ""


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
    slo: float | None = None
    """For jobs that name none; None: the cluster's bound."""
    model_roots: tuple[str, ...] = ()


class NodeDrainChanged(Event, frozen=True, kw_only=True):
    """An operator started or ended the drain of a node."""

    node: NodeId
    is_draining: bool


class NodeRemoved(Event, frozen=True, kw_only=True):
    """A node has left the cluster, or an operator removed a node that does not come back."""

    node: NodeId


class JobSubmitted(Event, frozen=True, kw_only=True):
    """A controller submitted a job."""

    job: JobId
    tenant: TenantId
    name: str
    controller_timeout_s: float
    """Time without a heartbeat after which the job counts as detached."""
    reattach_timeout_s: float
    """Time after which a detached job is cancelled, unless a controller attaches it."""
    priority: int = 0
    """Priority class: higher goes first, in admission and on a group."""
    gang: int = 0
    """Number of deployments that get GPUs together or not at all; 0: each gets its own."""
    expected_s: float = 0.0
    """Length that the user expects; 0: unknown."""
    slo: float | None = None
    """Greatest waiting / (waiting + running) that it accepts, below 1; 0: it shares with nobody.
    None: the tenant's."""
    controller: str = ""
    """Token of the controller, chosen by the controller; empty: none."""
    user: str = ""
    """Who submitted it, for the bill; empty: nobody in particular."""
    halts_on_failure: bool = False
    """A failed mutation halts its deployment until the controller acknowledges it. False in old
    journals."""
    quote: JobQuote | None = None
    """What it was told before; None: it did not ask."""
    fork: ForkView | None = None
    """Where it comes from; None: it is no fork."""


class ControllerSeen(Event, frozen=True, kw_only=True):
    """A heartbeat of the job's controller; it attaches a detached job again."""

    job: JobId
    controller: str = ""
    """Token of the sender. An event with a token other than the present controller's is refused;
    the empty token is accepted from any sender. The same holds in other events."""


class ControllerAttached(Event, frozen=True, kw_only=True):
    """A process became the controller of a live job; its former controller is fenced off."""

    job: JobId
    controller: str
    keep_gradients: bool = False
    """False: gradients that wait for a step are dropped: the new controller may not expect
    them."""


class FailureAcknowledged(Event, frozen=True, kw_only=True):
    """The controller acknowledged a failure, which is named by an operation that failed because of
    it, or by a deployment that it halts."""

    operation: OperationId | None = None
    deployment: DeploymentId | None = None
    controller: str = ""


class JobFinished(Event, frozen=True, kw_only=True):
    """The controller ended its job."""

    job: JobId
    outcome: str
    """`completed`, `failed` or `cancelled`."""
    reason: str = ""
    controller: str = ""


class DeploymentCreated(Event, frozen=True, kw_only=True):
    """A job created a deployment, which is a logical model."""

    deployment: DeploymentId
    job: JobId
    kind: str
    """`train` or `rollout`."""
    workers: int
    """Number of GPUs, each with one worker process."""
    state_bytes: int
    """GPU memory of the whole state, all ranks together."""
    exclusive: bool
    """The deployment shares its node group with no other; always so for a rollout without
    `shares`."""
    spec_json: str
    """What the worker needs to build the model; the core does not read it."""
    node_type: str = ""
    """Required node type; empty: any."""
    trace: DemandTrace | None = None
    """Demand that the user declared; placement uses it at once."""
    controller: str = ""
    shares: bool = False
    """A rollout shares its node group with other deployments, as trainings do."""
    shares_if_scarce: bool = False
    """A rollout that does not share yet may begin to, once the scheduler finds GPUs scarce."""
    preemptible: bool = False
    """A rollout that uses only idle time of a group of others, and gives way at once."""
    memory: DeviceMemory | None = None
    """What it needs on each GPU; None: unknown, its state only."""
    pace: str = ""
    """The modelled GPU and model that its workers keep the time of; empty: they compute."""
    steps_in_host: bool = False
    """An optimizer step of its stored state needs no GPU."""
    checkpoints: CheckpointSchedule | None = None
    """When a train deployment saves checkpoints of itself; None: when it is told to."""


class DeploymentRelaid(Event, frozen=True, kw_only=True):
    """A rollout deployment divides its GPUs in another way from now on."""

    deployment: DeploymentId
    state_bytes: int
    """As in `DeploymentCreated`, with the new layout."""
    spec_json: str
    """As in `DeploymentCreated`; it has as many workers as before."""
    controller: str = ""
    memory: DeviceMemory | None = None
    """As in `DeploymentCreated`."""


class DeploymentEnded(Event, frozen=True, kw_only=True):
    """A job needs a deployment no longer; the job goes on."""

    deployment: DeploymentId
    controller: str = ""


class StateMigrated(Event, frozen=True, kw_only=True):
    """A node's StateManager fetched a version, or failed to."""

    deployment: DeploymentId
    node: NodeId
    seq: int
    error: str = ""
    """Why the fetch failed; empty: it succeeded."""
    code: str = ""
    """Code of that error."""


class OperationSubmitted(Event, frozen=True, gc=False):
    """A controller submitted an operation."""

    operation: OperationId
    deployment: DeploymentId
    kind: OperationKind
    params: OperationParams | None = None
    """None: the kind has none, or the operation is simulated."""
    payload: BlobRef | None = None
    """Tensors, already durable; None if the kind has none."""
    tokens: int = 0
    """Size of the work, for estimates: tokens of the batch, or maximum number to generate."""
    source: DeploymentId | None = None
    """For `sync_weights`: the train deployment to pull from."""
    payload_bytes: int = 0
    payload_digest: str = ""
    """Digest of the payload: identifies a repeated request, whose payload has another name."""
    deadline_s: float | None = None
    """Time in which the operation must start, else it ends with `DeadlineExceededError`. None: no
    deadline."""
    in_flight: bool = False
    """For `sync_weights`: run during generations instead of after them."""
    ends_burst: bool = False
    """Last operation of a cycle, for a job whose rollouts run elsewhere: the group may go to others
    at once, as after a publish."""
    controller: str = ""
    published: bool = False
    """For `sync_weights`: pull the version that the newest `publish` of the source made."""
    from_job_key: bool = False
    """Sent with a key of the job, which agents have: no sign that its controller lives."""


class OperationCancelled(Event, frozen=True, kw_only=True):
    """A controller cancelled an operation."""

    operation: OperationId
    controller: str = ""
    rows: tuple[int, ...] | None = None
    """Only these rows of a generation. None: the whole operation."""


class TimerFired(Event, frozen=True, kw_only=True):
    """The time of a `SetTimer` was reached."""


class ServiceResumed(Event, frozen=True, kw_only=True):
    """The scheduler handles events again after an interruption, in which it received no
    heartbeats."""


CODEC: Codec[Event] = Codec(
    SchedulerStarted,
    NodeJoined,
    NodeLost,
    RouterJoined,
    RouterLost,
    TenantCreated,
    ApiKeyAdded,
    ApiKeyGranted,
    ApiKeyRevoked,
    JobKeyAdded,
    JobKeysRevoked,
    TenantConfigured,
    NodeDrainChanged,
    NodeRemoved,
    JobSubmitted,
    ControllerSeen,
    ControllerAttached,
    FailureAcknowledged,
    JobFinished,
    DeploymentCreated,
    DeploymentRelaid,
    DeploymentEnded,
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
    upgrade=upgrade_event,
    earlier=EARLIER_FIELDS,
)
