"""Views of the cluster, its nodes, groups and tenants, and of errors, as they go over the wire.

Times (`_at`, `now`) are seconds on the scheduler's clock. Scheduler, router, SDK and CLI share
these types.
"""

from typing import Any, NotRequired, TypedDict

from plexrl.access import KeyView
from plexrl.ids import (
    BlobRef,
    DeploymentId,
    FencingToken,
    GroupId,
    JobId,
    NodeId,
    TenantId,
)
from plexrl.process.conditions import ConditionView
from plexrl.wire.messages.run_views import QuotedJobView


class ErrorView(TypedDict):
    """`PlexRLError.to_wire()`."""

    code: str
    message: str
    details: dict[str, Any]
    """Plain JSON values."""


class TenantLimits(TypedDict):
    """A tenant's limits; None: no limit of its own."""

    weight: float
    """Weight of its share of the cluster."""
    jobs_max: int | None
    """Jobs that hold GPUs at the same time."""
    gpus_max: int | None
    """GPUs held at the same time."""
    gpu_seconds_max: float | None
    """GPU time in all."""
    live_jobs_max: int | None
    checkpoints_max: int | None
    """Checkpoints on the shared disk."""
    checkpoint_bytes_max: int | None
    priority_max: int
    """Highest priority class of its jobs."""
    slo: float | None
    """`slo` of its jobs that name none; None: the cluster's `waiting_part_max`."""
    model_roots: tuple[str, ...]
    """Directories below which it may load models."""


class HeldView(TypedDict):
    """A deployment that retries runs."""

    deployment: DeploymentId
    code: str
    """Code of the condition's error."""
    message: str
    since: float
    """When the first of these runs met one, in seconds on the scheduler's clock."""
    tries: int
    """Runs in a row that met a condition."""


class ForeignMemoryView(TypedDict):
    """Memory of a GPU that a process holds which is no worker, and for which runs wait."""

    node: NodeId
    gpu: int
    pid: int
    """Id of the process, as the node's StateManager sees it."""
    nbytes: int
    since: float
    """When a run first met it, in seconds on the scheduler's clock."""


class EtaQualityView(TypedDict):
    """Errors of the cluster's estimated waiting times, of a sample of the waits for groups."""

    estimates: int
    mean_error_s: float | None
    """Mean absolute error; None, as is `mean_late_s`: no estimates."""
    mean_late_s: float | None
    """Mean over all estimates of the time by which waits were longer than estimated."""
    slipped: int
    """Waits that were more than twice as long as estimated, and at least 1 s longer."""
    early: int
    """Starts before the 80 % interval of the estimate."""
    late: int
    """Starts after it."""
    ratios: dict[str, int]
    """Numbers of waits by (actual + 1 s) / (estimated + 1 s), cumulative by upper bound."""
    ratio_sum: float
    """Sum of these ratios."""


class SharingView(TypedDict):
    """GPU time that sharing saved one job; all in GPU-seconds."""

    tenant: TenantId
    job: JobId
    name: str
    user: NotRequired[str]
    """Who submitted the job; empty: nobody in particular, absent: from an earlier version."""
    reserved_gpu_seconds: float
    """GPU time of its groups, counted as if each deployment had been the only member."""
    waited_gpu_seconds: float
    """Its GPUs times the time it waited for other members."""
    isolated_gpu_seconds: float
    """Reserved without waited: with a group of its own for each deployment."""
    held_gpu_seconds: float
    """Its equal part of its groups' GPU time."""
    saved_gpu_seconds: float
    """Isolated without held."""


class ServiceLevelView(TypedDict):
    """What one live job accepts to wait, and what it waited."""

    job: JobId
    tenant: TenantId
    name: str
    slo: float
    """Greatest waiting / (waiting + running) that it accepts."""
    is_promised: bool
    """The job or its tenant named that bound; otherwise it is the cluster's aim."""
    waiting_part: float | None
    """The measured part, the greatest of its deployments; None: not measured."""


class GpuView(TypedDict):
    """One GPU of a group."""

    node: NodeId
    gpu: int
    """Index of the GPU on its node."""


class GroupView(TypedDict):
    """One node group and the holder of its lock."""

    group: GroupId
    gpus: list[GpuView]
    members: list[DeploymentId]
    fillers: list[DeploymentId]
    """Preemptible deployments, which use the members' idle time."""
    shared: bool
    node_type: str
    is_closed: bool
    """It takes no more members."""
    load: float
    """Sum of the members' duties."""
    holder: DeploymentId | None
    token: FencingToken
    phase: str
    """`idle`, `run`, `hold`, or the kind of the move in flight."""
    switches: int
    switch_seconds: float
    sharing: str
    """Why members share its GPUs or not, if the scheduler decides that."""


class NodeView(TypedDict):
    """One node."""

    node: NodeId
    gpus: int
    gpus_reserved: int
    """GPUs that belong to groups."""
    gpu_memory_bytes: int
    """Memory of each GPU."""
    gpu_kind: str
    host_memory_bytes: int
    host_ready_bytes: NotRequired[int]
    """Host tier that has been allocated in advance; absent: nothing is to be, or is unknown."""
    host_prefault_bytes: NotRequired[int]
    """How much of it is to be."""
    nvme_bytes: int
    """Capacity of its NVMe tier."""
    node_type: str
    speed: float
    """Speed of training, relative to other nodes."""
    block: str
    fabric: str
    """`trusted`: groups may span it and other trusted nodes."""
    is_draining: bool
    alive: bool
    groups: NotRequired[list[GroupId]]
    """For operators only."""
    host: NotRequired[str]
    """Address at which other machines reach it; empty: it is on the scheduler's machine. For
    operators only."""
    statemanager: NotRequired[str]
    """Address of its StateManager; for operators only."""
    foreign_memory: NotRequired[list[ForeignMemoryView]]
    """What loads on its GPUs wait for; for operators only."""


class BrokerView(TypedDict):
    """State of the connection to the MQTT broker."""

    connected: bool
    error: str
    """Why it is not; empty: it is, or was not tried yet."""
    sent: int
    queued: int
    dropped: int


class SkippedStepsView(TypedDict):
    """Steps of the scheduler that failed, and were skipped."""

    steps_set_aside: int
    newest_set_aside: str
    """The newest one of this process; empty: there is none."""


class FaultsView(SkippedStepsView):
    """Faults of the scheduler, and the state of its events."""

    snapshot_error: str
    """Why the latest snapshot failed; empty: it did not."""
    events: BrokerView | None
    """None: the cluster has no MQTT broker."""


class PartView(TypedDict):
    """A part of the cluster that has ended at least once since the cluster's start; times in
    seconds since the epoch."""

    restarts: int
    last_restart_at: float | None
    down_since: float | None
    """None: the part runs."""
    stuck_since: float | None
    """None: the part answers."""


class ClusterTotals(TypedDict):
    """Totals that a tenant sees of its own jobs."""

    tenants: NotRequired[int]
    """For operators only."""
    operations_finished: int
    """For a tenant, without the operations that never ran."""
    context_switches: NotRequired[int]
    """For operators only, as are the next fields."""
    steps_set_aside: NotRequired[int]
    """As in `FaultsView`."""
    newest_set_aside: NotRequired[str]
    snapshot_error: NotRequired[str]
    events: NotRequired[BrokerView | None]
    parts: NotRequired[dict[str, PartView]]
    """Added by the router."""


class ClusterView(ClusterTotals):
    """Totals of the cluster."""

    now: float
    nodes: int
    gpus: int
    gpus_reserved: int
    """GPUs that belong to groups."""
    routers: int
    jobs_live: int
    jobs_total: int
    deployments_waiting: int
    """Deployments that wait for GPUs."""
    deployments_impossible: int
    """The number of these that can never get the GPUs they ask for."""
    deployments_over_slo: int
    """Deployments that waited a greater part of their time than their job accepts."""
    operations_pending: int
    held: list[HeldView]
    eta_quality: EtaQualityView
    planning: dict[str, str | int | float | bool | None]
    """Settings that decide which jobs share and who goes next, by their names in
    `SchedulerConfig`."""


class UsageView(TypedDict):
    """Use of one job by operations of one kind."""

    tenant: TenantId
    job: JobId
    name: str
    user: NotRequired[str]
    """As in `SharingView`."""
    kind: str
    operations: int
    failed: int
    tokens: int
    gpu_seconds: float
    paced: bool
    """A deployment of the job is paced: its GPUs computed nothing."""


class NewTenantView(TypedDict):
    """A tenant that was just made."""

    tenant: TenantId
    api_key: str
    """Its first key, which is shown only once."""


class TenantView(TenantLimits):
    """One tenant: limits, holdings and usage."""

    tenant: TenantId
    is_operator: bool
    keys: list[KeyView]
    gpus_held: int
    jobs_running: int
    """Jobs that hold GPUs."""
    live_jobs: int
    live_jobs_bound: int | None
    """Maximum number of live jobs, its own or the cluster's; None: no limit."""
    gpu_seconds: float
    """GPU time used so far, with what runs."""
    share: float
    """GPU-hours per weight, decayed; it decides the order of admission."""


class DescribedTenantView(TenantView):
    """One tenant, with its checkpoints."""

    checkpoints: int
    checkpoint_bytes: int
    checkpoints_bound: int | None
    """Most checkpoints, its own bound or the cluster's; None: it is an operator."""
    checkpoint_bytes_bound: int | None
    """Most bytes of them; None: no bound."""


class CheckpointOwnerView(TypedDict):
    """The tenant of a job's checkpoints, and its checkpoint limits."""

    tenant: TenantId
    is_operator: bool
    checkpoints_max: int | None
    checkpoint_bytes_max: int | None
    jobs: list[JobId]


class ModelRootsView(TypedDict):
    """Directories below which a tenant may load models."""

    model_roots: tuple[str, ...]


class EmptyView(TypedDict):
    """The answer to a call that only changes something."""


class NeedlessPayloadsView(TypedDict):
    """Payloads that no operation needs."""

    blobs: list[BlobRef]


class ConditionsView(TypedDict):
    """Conditions that the scheduler knows of."""

    conditions: list[ConditionView]


class HealthView(TypedDict):
    """Health of the cluster, as it is shown without a key."""

    ok: bool
    """No condition stops or delays work."""
    scheduler: bool
    """The router is connected to the scheduler."""
    conditions: list[ConditionView]
    restarts: int
    """Restarts of parts since the cluster's start."""
    last_restart_at: float | None
    """Seconds since the epoch; None: no part was restarted."""


class StatusView(ClusterView):
    """The cluster in a few numbers, and its health."""

    conditions: list[ConditionView]
    restarts: int
    last_restart_at: float | None


class Nodes(TypedDict):
    """Nodes of the cluster."""

    nodes: list[NodeView]


class ForgottenNode(TypedDict):
    """A node that was removed."""

    node: NodeId


class Groups(TypedDict):
    """Node groups of the cluster."""

    groups: list[GroupView]


class Tenants(TypedDict):
    """Tenants, as the scheduler knows them."""

    tenants: list[TenantView]


class DescribedTenants(TypedDict):
    """Tenants, with their checkpoints."""

    tenants: list[DescribedTenantView]


class UsageReport(TypedDict):
    """Usage by job and kind of operation; savings by sharing, and quotes beside bills, by job."""

    usage: list[UsageView]
    sharing: list[SharingView]
    quoted: list[QuotedJobView]


class ServiceLevels(TypedDict):
    """What live jobs accept to wait, and what they waited."""

    jobs: list[ServiceLevelView]


class RunView(TypedDict):
    """One run."""

    run: str
    tenant: str
    script: str
    state: str
    attempts: int
    exit_code: int | None
    reason: str
    created_at: float
    started_at: float | None
    ended_at: float | None


class Runs(TypedDict):
    """The answer to a list of runs."""

    runs: list[RunView]
