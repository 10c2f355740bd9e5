"""What the scheduler core knows: plain records, changed only by the core's modules.

Laws, checked by `SchedulerCore.check_invariants`:

* a group's lock is held by at most one member, and only it has operations in flight there;
* an operation is in exactly one place: a queue, a run, or the finished history;
* a WPG's mutations carry consecutive numbers, and `durable_seq` ≤ `completed_seq`;
* the replay log holds exactly what a recovery from `durable_seq` needs, in order.
"""

from dataclasses import dataclass, field

from plexrl.ids import (
    DeploymentId,
    FencingToken,
    GroupId,
    JobId,
    NodeId,
    OperationId,
    RouterId,
    TenantId,
)
from plexrl.scheduler.state.commands import RankPlacement, RunOperation
from plexrl.scheduler.state.demand import DemandTrace
from plexrl.scheduler.state.deployment.backoff import Backoff
from plexrl.scheduler.state.deployment.burst import Burst
from plexrl.scheduler.state.deployment.cycles import Cycles
from plexrl.scheduler.state.deployment.moves import Moves
from plexrl.scheduler.state.deployment.processes import Processes
from plexrl.scheduler.state.deployment.replay_log import ReplayLog
from plexrl.scheduler.state.deployment.stored_version import StoredVersion
from plexrl.scheduler.state.deployment.switch_times import SwitchTimes
from plexrl.scheduler.state.estimates import Estimates, MoveLaw
from plexrl.scheduler.state.machines.job_states import JobState
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.operation import Failure, Operation
from plexrl.scheduler.state.tenant import Tenant
from plexrl.wire.operations import OperationKind


@dataclass(slots=True, kw_only=True)
class Node:
    """One node, as its agent described it."""

    node: NodeId
    gpus: int
    gpu_memory_bytes: int
    host_memory_bytes: int
    statemanager: str
    node_type: str = ""
    block: str = ""
    """Where it stands in the topology: nodes of one block are near each other."""
    nvme_bytes: int = 0
    """Bound of its NVMe tier."""
    alive: bool = True
    lost_at: float | None = None
    """Since when it has been away; absent while it is there, and while nothing is known yet of a
    node after the scheduler was started anew."""
    is_draining: bool = False
    """An operator wants it empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a member has of its group's time."""

    shift: float
    """Slots from the ring's start to the start of one of its cycles."""
    trace: DemandTrace | None
    """Absent: all of it, because no profile says less."""
    overlap_s: float = 0.0
    """Seconds of a cycle in which another member is busy too, by the plan, when this was laid;
    infinite where they were not counted, 0 if the others have gone since. Above 0, the member gives
    way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRecord:
    """How a deployment came to its group, for whoever asks later."""

    at: float
    way: str
    group: GroupId
    members: int
    """Of the group, with this one."""
    shift_s: float
    """Micro-shift δ: seconds from `at` to the first cycle that the plan holds free."""
    setup_s: float
    """Estimated, of bringing its state onto the GPUs."""
    overlap_s: float
    """Seconds of a cycle in which another member is busy too, by the plan."""
    interference_s: float
    contention: float | None = None
    """waiting / (waiting + running) that the group's members were to have on average once phases
    had relaxed, this one among them; absent where a member's demand was not known."""


@dataclass(slots=True, kw_only=True)
class UsageRow:
    """What one job used in one kind of operation."""

    operations: int = 0
    failed: int = 0
    gpu_seconds: float = 0.0
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Sharing:
    """What a job had of groups, counted up to their last change (`sharing`)."""

    reserved_gpu_seconds: float = 0.0
    """On the groups that its deployments were on, as if each had been the only member."""
    held_gpu_seconds: float = 0.0
    """Its equal part of those groups' time."""
    waited_gpu_seconds: float = 0.0
    """Its GPUs times what it waited for other members."""
    wait_since: float = 0.0
    """Of the last wait that is counted, or of several that overlapped."""
    wait_until: float = 0.0


@dataclass(slots=True, kw_only=True)
class InFlight:
    """Callers' operations that were accepted and are not finished, and the pace of their ends."""

    operations: int = 0
    payload_bytes: int = 0
    ended_at: float | None = None
    """When one last ended."""
    gap_s: float | None = None
    """Usual time from one's end to the next one's, while there is one to end."""
    bytes_each: float = 0.0
    """Usual payload of one."""


@dataclass(slots=True, kw_only=True)
class HeldTime:
    """GPU time that a tenant's jobs held, for the order of admission."""

    at: float
    gpu_seconds: float = 0.0
    """Up to `at`, fading (`fair_shares`)."""
    waited_at: float | None = None
    """When one of its deployments last began to wait for GPUs, or got some."""


@dataclass(slots=True, kw_only=True)
class Deployment:
    """A deployment and the WPG that realises it."""

    deployment: DeploymentId
    job: JobId
    kind: str
    workers: int
    state_bytes: int
    exclusive: bool
    spec_json: str
    created_at: float
    estimates: Estimates
    state: WpgState = WpgState.WAITING
    residency: Residency = Residency.NONE
    group: GroupId | None = None
    ranks: tuple[RankPlacement, ...] = ()
    nodes: tuple[NodeId, ...] = ()
    """Of its ranks, each once, by name."""
    node_type: str = ""
    """Wanted; empty: any."""
    trace: DemandTrace | None = None
    """Its demand, once profiled or where the user declared it."""
    reservation: Reservation | None = None
    placement: PlacementRecord | None = None
    queue: list[OperationId] = field(default_factory=list)
    running: dict[OperationId, RunOperation] = field(default_factory=dict)
    moving: RunOperation | None = None
    """The internal move (load, offload, snapshot) in flight."""
    waiting_gradients: int = 0
    """Completed `forward_backward`s whose gradients wait for a step."""
    unacknowledged: list[Failure] = field(default_factory=list)
    """What halts its mutations, syncs and checkpoints until the controller takes note of it; the
    oldest first."""
    published_seq: int | None = None
    trainer_step: int = 0
    """Optimizer steps in its weights; of a rollout or reference, those of its trainer that are in
    what was synced or loaded last."""
    metered_at: float | None = None
    """Up to when the GPU time of its runs is accounted for."""
    in_flight: InFlight = field(default_factory=InFlight)
    no_snapshot_until: float = 0.0
    """After a snapshot that found no room; the log grows meanwhile. 0: the last one found room."""
    processes: Processes = field(default_factory=Processes)
    moves: Moves = field(default_factory=Moves)
    stored: StoredVersion = field(default_factory=StoredVersion)
    cycles: Cycles = field(default_factory=Cycles)
    replay: ReplayLog = field(default_factory=ReplayLog)
    burst: Burst = field(default_factory=Burst)
    switch_times: SwitchTimes = field(default_factory=SwitchTimes)
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def is_ready(self) -> bool:
        return self.state == WpgState.READY

    @property
    def shares(self) -> bool:
        """Whether it may be one of several on a group."""
        return self.kind != "rollout" and not self.exclusive


@dataclass(slots=True, kw_only=True)
class Group:
    """A node group: GPUs that its members take turns on."""

    group: GroupId
    gpus: tuple[RankPlacement, ...]
    """`rank` is the place in the group."""
    shared: bool
    serial: int
    """Its number in the order of making: breaks ties."""
    node_type: str = ""
    gpu_memory_bytes: int = 0
    is_closed: bool = False
    """Takes no more members: the service level of one that is there would be broken."""
    members: list[DeploymentId] = field(default_factory=list)
    holder: DeploymentId | None = None
    """The member that has the lock: its state is on the GPUs, or on the way there or off."""
    prefetched: DeploymentId | None = None
    """Whose state was last asked to be brought into host memory."""
    incoming: DeploymentId | None = None
    """During an offload of the holder: who gets the lock next."""
    token: FencingToken = FencingToken(0)
    switched: bool = False
    """The load in flight is the second half of a context switch."""
    switches: int = 0
    switch_seconds: float = 0.0
    settled_at: float | None = None
    """Up to when its time is counted to its members' jobs (`sharing`)."""
    alone_since: float = 0.0
    """When the last but one of its members left; 0: it never had several."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One job and its life so far."""

    job: JobId
    tenant: TenantId
    name: str
    controller_timeout_s: float
    reattach_timeout_s: float
    submitted_at: float
    seen_at: float
    state: JobState = JobState.QUEUED
    attached: bool = True
    is_set_aside: bool = False
    """It gave its GPUs to others and waits for none until a controller attaches it."""
    reason: str = ""
    ended_at: float | None = None
    priority: int = 0
    """Class: higher goes first, in admission and on a group."""
    gang: int = 0
    """Deployments that get GPUs all at once or not at all; 0: each by itself."""
    expected_s: float = 0.0
    """Length by the user's word; 0: unknown."""
    controller: str = ""
    """Token of its present controller; empty: nobody has named one."""
    halts_on_failure: bool = False
    """A failed mutation halts its deployment until the controller acknowledges it."""
    deployments: list[DeploymentId] = field(default_factory=list)
    usage: dict[OperationKind, UsageRow] = field(default_factory=dict)
    """By kind of operation."""
    sharing: Sharing = field(default_factory=Sharing)


@dataclass(slots=True)
class EtaErrors:
    """How far estimates of a wait were from what it became, in seconds."""

    waits: int = 0
    """Bursts that had to wait, of which a part was estimated."""
    count: int = 0
    """Estimates compared."""
    absolute_s: float = 0.0
    """Summed."""
    late_s: float = 0.0
    """Summed, of those that started later than was said."""
    slipped: int = 0
    """Waits that became more than twice as long as was said, and 1 s longer at least."""


@dataclass(slots=True, kw_only=True)
class ForgottenJobs:
    """What is left of a tenant's jobs that ended long ago."""

    jobs: int = 0
    operations: int = 0
    """That they ran."""


@dataclass(slots=True)
class State:
    """All of it."""

    nodes: dict[NodeId, Node] = field(default_factory=dict)
    routers: list[RouterId] = field(default_factory=list)
    tenants: dict[TenantId, Tenant] = field(default_factory=dict)
    held: dict[TenantId, HeldTime] = field(default_factory=dict)
    in_flight: dict[TenantId, InFlight] = field(default_factory=dict)
    jobs: dict[JobId, Job] = field(default_factory=dict)
    ended: dict[JobId, None] = field(default_factory=dict)
    """Those of the jobs that have ended, in the order in which they did."""
    forgotten: dict[TenantId, ForgottenJobs] = field(default_factory=dict)
    retired: dict[DeploymentId, int] = field(default_factory=dict)
    """Last incarnation of forgotten deployments, the newest ones, oldest first."""
    retired_incarnation: int = 0
    """The highest of all older ones."""
    deployments: dict[DeploymentId, Deployment] = field(default_factory=dict)
    groups: dict[GroupId, Group] = field(default_factory=dict)
    profiles: dict[str, DemandTrace] = field(default_factory=dict)
    """Measured demand of deployments that were, by what a later one must share with them."""
    move_laws: dict[str, MoveLaw] = field(default_factory=dict)
    """By kind of move, tier and node type: what moves take."""
    operations: dict[OperationId, Operation] = field(default_factory=dict)
    finished: dict[int, OperationId] = field(default_factory=dict)
    """The newest ones by their place in the operation log, oldest first."""
    finished_count: int = 0
    eta_errors: EtaErrors = field(default_factory=EtaErrors)
    searches: dict[str, int] = field(default_factory=dict)
    """By size: how often groups' time was searched in vain since capacity came free."""
    timers_swept: int = 0
    """Timers that were left when those without a purpose were last thrown away."""
    groups_made: int = 0
    former_switches: int = 0
    """Context switches of groups that are no more."""
    moves_made: int = 0
    tokens_made: int = 0
    """The highest token of any group so far."""
