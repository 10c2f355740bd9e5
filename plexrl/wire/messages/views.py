"""Views of jobs, deployments and operations, as they go over the wire.

Times (`_at`, `now`) are seconds on the scheduler's clock. Scheduler, router, SDK and CLI share
these types.
"""

from typing import Literal, NotRequired, TypedDict

from plexrl.ids import (
    BlobRef,
    DeploymentId,
    FencingToken,
    GroupId,
    JobId,
    NodeId,
    OperationId,
    TenantId,
)
from plexrl.wire.messages.cluster_views import ErrorView, EtaQualityView
from plexrl.wire.messages.run_views import ForkView, QuotedJobView, RunHealthView
from plexrl.wire.messages.workers import EngineLoadView, EngineView


class MemoryTermView(TypedDict):
    """One summand of what a deployment needs on each GPU."""

    name: str
    nbytes: int
    stays: bool
    """It stays on the GPU while the deployment is offloaded."""


class MemoryView(TypedDict):
    """Memory on each GPU of a deployment, as placement counts it."""

    terms: list[MemoryTermView]
    need_bytes: int
    """The sum."""
    is_measured: bool
    """The activations are measured, not estimated."""
    others_keep_bytes: int
    """What the others of its group keep on each GPU while it works."""
    gpu_memory_bytes: int | None
    """Memory of each GPU of its group; None: it has no group."""
    gpu_kind: str
    """Name of the GPUs; empty: they are virtual, and only states count."""


class ExplanationView(TypedDict):
    """`explain_operation.Explanation`."""

    reason: str
    rule: str
    holder: str | None
    """The holder of the group's lock; anonymous if it belongs to another tenant."""
    eta_s: float | None
    """Estimated seconds until it starts, or until it ends if it runs; None if unknown."""
    eta_low_s: float | None
    """Start of the 80 % interval; None without an estimate of waiting for a group."""
    eta_high_s: float | None
    """End of it."""
    position: int
    """Number of operations of the same deployment ahead of it."""


class OperationView(TypedDict):
    """One operation."""

    operation: OperationId
    deployment: DeploymentId
    job: JobId
    tenant: TenantId
    kind: str
    state: str
    seq: int
    """Its number, for a mutation; else that of the last mutation before it. 0: not dispatched."""
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    deadline_at: float | None
    compute_s: float | None
    """Time of the workers."""
    payload: BlobRef | None
    result: BlobRef | None
    result_json: str
    error: ErrorView | None
    """None: it has not failed."""
    explanation: ExplanationView | None
    """Why it waits; None: it has ended."""


class PolledOperationView(OperationView):
    """One operation, for its controller."""

    job_failure: ErrorView | None
    """The first failure of its job that is not acknowledged."""


class LoggedOperationView(OperationView):
    """One row of the operation log."""

    index: int
    """Index in the log, from 1."""
    queue_s: float | None
    """Waiting time without context switches; None: it never started."""
    switch_s: float
    """Waiting time during context switches."""
    transfer_s: float
    """Time in the router."""
    payload_bytes: int
    result_bytes: int
    tokens: int
    group: GroupId | None
    token: FencingToken
    internal: bool
    """The scheduler made it: a load, an offload, a snapshot or a publish."""
    interruptions: int
    """Runs of a generation that were interrupted for others, and continued."""


class RankView(TypedDict):
    """One rank of a deployment."""

    rank: int
    node: NodeId
    gpu: int
    """Index of the GPU on its node."""
    address: str | None
    """None: its worker is not ready."""


class CheckpointScheduleView(TypedDict):
    """As `CheckpointSchedule`."""

    every: int
    keep_last: int | None


class DeploymentView(TypedDict):
    """One deployment and its WPG."""

    deployment: DeploymentId
    job: JobId
    tenant: TenantId
    kind: str
    workers: int
    exclusive: bool
    shares_if_scarce: bool
    """A rollout for which the scheduler decides: while `exclusive`, it has GPUs of its own."""
    preemptible: bool
    state: str
    residency: str
    group: GroupId | None
    """The group of its first ranks."""
    groups: list[GroupId]
    """All its groups."""
    ranks: list[RankView]
    incarnation: int
    applied_seq: int
    """Number of its last completed mutation."""
    waiting_gradients: int
    """Batches whose gradients are computed and wait for a step."""
    trainer_step: int
    """Optimizer steps in its weights."""
    failure: ErrorView | None
    """Its first failure that is not acknowledged."""
    durable_seq: int
    """Version that the StateManagers hold whole; 0: the initial weights."""
    state_bytes: int
    nvme_bytes: int
    """Bytes of its state on NVMe alone, on the node that has most there."""
    load_s: float
    """Estimated seconds to load its state."""
    offload_s: float
    """Estimated seconds to offload its state."""
    waiting_part: float | None
    """Measured waiting / (waiting + running); None: not measured."""
    pending: int
    """Number of queued operations."""
    running: list[str]
    """Kinds of the operations in flight."""
    spec_json: str
    node_type: str
    """Required node type; empty: any."""
    pace: str
    """The modelled GPU and model that its workers keep the time of: its GPUs compute nothing.
    Empty: they compute."""
    checkpoints: CheckpointScheduleView | None
    """When it saves checkpoints of itself; None: when it is told to."""


class JobView(TypedDict):
    """One job with its deployments."""

    job: JobId
    tenant: TenantId
    name: str
    user: NotRequired[str]
    """Who submitted it; empty: nobody in particular, absent: from an earlier version."""
    state: str
    attached: bool
    reason: str
    """Why it ended; empty: no reason was given."""
    failure: ErrorView | None
    """Its first failure that is not acknowledged."""
    priority: int
    slo: float
    """Greatest waiting / (waiting + running) that it, its tenant or the cluster accepts."""
    gpu_seconds: float
    controller_timeout_s: float
    """Silence of the controller after which it is detached."""
    submitted_at: float
    ended_at: float | None
    deployments: list[DeploymentView]
    health: NotRequired[RunHealthView]
    """Added by the router: what it sees of the run."""
    quoted: NotRequired[QuotedJobView]
    """If it was created with a quote."""
    fork: NotRequired[ForkView]
    """If it is a fork of another job."""


class CreatedDeploymentView(DeploymentView):
    """A deployment that was created, or existed."""

    parameters: int
    """Number of the model's parameters."""


class DeploymentStatus(DeploymentView):
    """One deployment, with its engines."""

    engines: list[EngineView]
    """For a rollout whose weights are on the device: one for each replica."""


class HeartbeatView(JobView):
    """One job, as its controller sees it at each heartbeat."""

    lost_payloads: list[OperationId]
    """Operations whose payloads the cluster has lost and the controller is to send again."""


class FailureView(TypedDict):
    """What is left of a job's failures after one was acknowledged."""

    failure: ErrorView | None
    """Its next failure that is not acknowledged."""


class Jobs(TypedDict):
    """Jobs that the caller may see."""

    jobs: list[JobView]


class Operations(TypedDict):
    """Finished operations, oldest first."""

    operations: list[LoggedOperationView]


class EngineStates(TypedDict):
    """The engines of a rollout deployment, after a request to all of them."""

    engines: list[EngineView]


class EngineLoads(TypedDict):
    """The load of a rollout deployment's engines; one without an answer in time is left out."""

    engines: list[EngineLoadView]


class MetricsRow(TypedDict):
    """One row of a job's metrics."""

    index: int
    """Counted from 1."""
    step: int
    time: float
    """Seconds since the epoch."""
    values: dict[str, float]
    rewinds_from: NotRequired[int]
    """The step of the row before, if it is higher: the controller went back to an earlier state."""


class HolderView(TypedDict):
    """`explain_holders.Holder`."""

    job: JobId | None
    """None, as are `tenant` and `name`: hidden from other tenants."""
    tenant: TenantId | None
    name: str | None
    gpus: int
    """GPUs that a waiting deployment could use."""
    condition: str
    silent_s: float
    """Time since the last message of the controller."""
    idle_s: float | None
    """Time since it last worked; None while it works."""
    cancelled_in_s: float | None
    """Time until it is cancelled if its controller stays silent; None otherwise."""


class Census(TypedDict):
    """Numbers of groups of the wanted size, each under the first reason against it."""

    groups: int
    """All of them."""
    closed: int
    full: int
    """With the maximum number of members."""
    without_memory: int
    device_full: int
    loaded: int
    """Too busy."""
    open: int
    """With capacity by load and memory."""


Count = Literal["groups", "closed", "full", "without_memory", "device_full", "loaded", "open"]


class NewGroupAttempt(TypedDict):
    """Why a deployment gets no group of its own."""

    way: str
    free_gpus: int
    """GPUs that are in no group."""
    why: str


class SharedGroupAttempt(Census):
    """Why a placement mode puts a deployment into none of the existing groups."""

    way: str
    over_slo: bool
    """There is a group with room for it, and a member would wait more than its job accepts."""
    why: str


AttemptView = NewGroupAttempt | SharedGroupAttempt
"""Why a placement mode fails."""


class NearGroupView(TypedDict):
    """A group in which a deployment's trace fits well."""

    group: GroupId
    members: list[str]
    """Anonymous if they belong to another tenant."""
    shift_s: float
    """Micro-shift δ: seconds to the start of the first reserved cycle."""
    overlap_s: float
    """Seconds of a cycle in which another member is busy too."""
    interference_s: float
    contention: float | None
    """Predicted waiting / (waiting + running), averaged over the members; None: unknown."""
    load: float
    """Sum of the members' duties."""


class PlacementView(TypedDict):
    """`PlacementRecord`: how a deployment was placed on its group."""

    at: float
    way: str
    group: GroupId
    members: int
    """Members of the group, including this one."""
    by_prior: bool
    """The demand of a member was that of others like it: tenants are not told what follows from
    it."""
    shift_s: float | None
    """Micro-shift δ: seconds from `at` to the start of the first reserved cycle."""
    setup_s: float
    """Estimated seconds to load its state onto the GPUs."""
    overlap_s: float | None
    """Planned seconds of a cycle in which another member is busy too."""
    interference_s: float | None
    contention: float | None
    """Predicted waiting / (waiting + running), averaged over the members; None: unknown."""


class SegmentView(TypedDict):
    """One busy stretch of a cycle."""

    offset_s: float
    """Start, relative to the start of the cycle."""
    duration_s: float
    slack_s: float
    """Delay that does not lengthen the cycle."""


class ProfileView(TypedDict):
    """A deployment's demand."""

    period_s: float
    busy_s: float
    """Busy seconds of a cycle."""
    duty: float
    """Busy part of a cycle."""
    jitter_s: float
    """Standard deviation of the cycle's length."""
    segments: list[SegmentView]
    cycles: int
    """Number of measured cycles; 0: the demand was declared."""


class PlacedDeploymentView(TypedDict):
    """Where a deployment is placed and why."""

    deployment: DeploymentId
    state: str
    group: GroupId | None
    """The group of its first ranks."""
    groups: list[GroupId]
    """All its groups."""
    nodes: list[NodeId]
    topology: str
    """How its nodes lie to each other, such as `2 nodes in row1/rack3`; empty: no GPUs."""
    placement: PlacementView | None
    moves: int
    moved_because: str
    """Reason of its last move; empty: it was not moved."""
    waiting_part: float | None
    """Measured waiting / (waiting + running); None: not measured."""
    profile: ProfileView | None
    """None: its demand is unknown."""
    attempts: list[AttemptView]
    """While it waits for GPUs."""
    near: list[NearGroupView]
    """Other groups in which it fits best."""
    memory: MemoryView | None
    pace: str
    """As in `DeploymentView`."""
    sharing: str
    """Why the scheduler lets it share its GPUs or not; empty: its controller said so."""


class WaitingOperationView(ExplanationView):
    """One unfinished operation and what it waits for."""

    operation: OperationId
    deployment: DeploymentId
    kind: str
    waited_s: float
    """Time since its submission."""


class RolloutWaitView(TypedDict):
    """What one asynchronous rollout of a job waits for."""

    rollout: str
    waits_for: str
    """Such as samples without a reward; empty: it generates, or has failed."""


class TextFilesView(TypedDict):
    """The files of a model's tokenizer."""

    files: dict[str, str]
    """The text of each file by its name: `tokenizer.json`, its configuration and others."""


class ExplainedJobView(TypedDict):
    """What a job waits for and until when, where it is placed and why."""

    job: JobId
    tenant: TenantId
    name: str
    state: str
    slo: float
    """Greatest waiting / (waiting + running) that it accepts."""
    summary: str
    deployments: list[PlacedDeploymentView]
    operations: list[WaitingOperationView]
    holders: list[HolderView]
    rollouts: NotRequired[list[RolloutWaitView] | None]
    """Added by the router, which asks the rollout service; None: it does not answer."""
    health: NotRequired[RunHealthView]
    """As in `JobView`."""
    eta_quality: EtaQualityView
