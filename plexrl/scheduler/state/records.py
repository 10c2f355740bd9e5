"""The scheduler core's state: plain records, which only the core's modules change.

Invariants, checked by `SchedulerCore.check_invariants`:

* only the holder of a group's lock has operations in flight on the group;
* an operation is in exactly one of a queue, a run and the finished history;
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
from plexrl.scheduler.state.demand.estimates import MoveLaw
from plexrl.scheduler.state.demand.job_quote import JobQuote
from plexrl.scheduler.state.demand.trace import DemandTrace, ShapeDemand
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.placement import Placement
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.deployment.work import DeploymentWork, InFlight
from plexrl.scheduler.state.deployment.wpg.wpg import Wpg
from plexrl.scheduler.state.machines.job_states import JobState
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.tenant import Tenant
from plexrl.wire.messages import RankPlacement
from plexrl.wire.messages.run_views import ForkView
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
    """Position in the topology: nodes of one block are close together."""
    nvme_bytes: int = 0
    """Capacity of its NVMe tier."""
    alive: bool = True
    lost_at: float | None = None
    """When its agent was lost; None while it is connected, and after a start of the scheduler until
    its agent connects or is given up."""
    is_draining: bool = False
    """An operator started a drain."""
    host: str = ""
    """Address at which other machines reach it; empty: it is on the scheduler's machine."""
    ports: tuple[int, int] = (0, 0)
    """First and last port at which ranks may meet; 0: none."""
    fabric: str = ""
    """`trusted`: WPGs may span it and other trusted nodes."""
    machine: str = ""
    """The machine on which its agent runs; empty: unknown."""
    last_port: int = 0
    """The port at which ranks were told last to meet; 0: none was."""
    gpu_kind: str = ""
    """Name of its GPUs; empty: they are virtual."""
    speed: float = 0.0
    """Relative speed of training; 0: by the names of its GPUs and its type."""


@dataclass(slots=True, kw_only=True)
class ReservedStart:
    """The reservation of a starving deployment (`admission.queues.reservations`)."""

    at: float
    """When it has its GPUs, if running jobs end by their expected lengths."""
    renewals: int = 0
    """How often the time has come without the GPUs."""


@dataclass(slots=True, kw_only=True)
class UsageRow:
    """Use of one job by operations of one kind."""

    operations: int = 0
    failed: int = 0
    gpu_seconds: float = 0.0
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Sharing:
    """A job's use of shared groups, up to their last change (`jobs.sharing`)."""

    reserved_gpu_seconds: float = 0.0
    """GPU time of its groups, counted as if each deployment had been the only member."""
    held_gpu_seconds: float = 0.0
    """Its equal part of these groups' GPU time."""
    waited_gpu_seconds: float = 0.0
    """Its GPUs times the time it waited for other members."""
    wait_since: float = 0.0
    """Start of the last counted wait, or of several that overlapped."""
    wait_until: float = 0.0


@dataclass(slots=True, kw_only=True)
class HeldTime:
    """GPU time that a tenant's jobs held; it decides the order of admission."""

    at: float
    gpu_seconds: float = 0.0
    """Decayed GPU time up to `at` (`admission.fair_shares`)."""
    waited_at: float | None = None
    """When a deployment of it last began to wait for GPUs, or got some."""


@dataclass(slots=True, kw_only=True)
class Deployment:
    """A deployment and the WPG that runs it, in five parts. Each is written by its own module
    alone (`tests/scheduler/state/test_owners.py`)."""

    deployment: DeploymentId
    job: JobId
    serial: int = 0
    """Number in the order of creation; breaks ties."""
    created_at: float
    spec: RequestedSpec
    placement: Placement = field(default_factory=Placement)
    wpg: Wpg = field(default_factory=Wpg)
    work: DeploymentWork = field(default_factory=DeploymentWork)
    demand: Demand

    @property
    def has_gpus(self) -> bool:
        """Whether GPUs were given to it; a filler uses those of others."""
        return bool(self.placement.groups) and not self.spec.preemptible

    @property
    def is_profiled(self) -> bool:
        """Whether its demand is measured: others may use its group, or it trains."""
        spec = self.spec
        return not spec.preemptible and (spec.kind != "rollout" or spec.may_share)


@dataclass(slots=True, kw_only=True)
class Group:
    """A node group: GPUs that its members use in turn. A member may be on other groups, too."""

    group: GroupId
    gpus: tuple[RankPlacement, ...]
    """`rank` is the index in the group."""
    shared: bool
    serial: int
    """Number in the order of creation; breaks ties."""
    node_type: str = ""
    gpu_memory_bytes: int = 0
    gpu_kind: str = ""
    is_closed: bool = False
    """It takes no more members: a member would miss its service level."""
    members: list[DeploymentId] = field(default_factory=list)
    fillers: list[DeploymentId] = field(default_factory=list)
    """Preemptible deployments, which have the lock only while no member needs it. They are in no
    plan and no prediction."""
    holder: DeploymentId | None = None
    """The member or filler that has the lock: its state is on the GPUs, or is being loaded or
    offloaded."""
    prefetched: DeploymentId | None = None
    """Member whose state was prefetched last."""
    incoming: DeploymentId | None = None
    """The next holder, during the offload of the present one. Without a present one it awaits the
    offloads of the holders of its other groups."""
    token: FencingToken = FencingToken(0)
    switched: bool = False
    """The load in flight is the second half of a context switch."""
    switches: int = 0
    switch_seconds: float = 0.0
    settled_at: float | None = None
    """Time up to which its GPU time is counted to its members' jobs (`jobs.sharing`)."""
    alone_since: float = 0.0
    """When it last dropped to one member; 0: it never had several."""
    shares: dict[TenantId, float] = field(default_factory=dict)
    """Seconds by weight that each contending tenant has had (`candidates.group_shares`)."""
    shared_at: float = 0.0
    """Time up to which they are counted."""
    wait_errors: list[float] = field(default_factory=list)
    """Errors of the newest estimated waits for it, oldest first (`demand.wait_intervals`)."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One job."""

    job: JobId
    serial: int = 0
    """Number in the order of submission; breaks ties."""
    tenant: TenantId
    name: str
    controller_timeout_s: float
    reattach_timeout_s: float
    submitted_at: float
    seen_at: float
    """When its controller last sent something. Not reset by a restart, so that the time until the
    job is cancelled goes on while no scheduler runs."""
    state: JobState = JobState.QUEUED
    attached: bool = True
    is_set_aside: bool = False
    """It gave its GPUs to others, and gets none until a controller attaches it."""
    reason: str = ""
    ended_at: float | None = None
    priority: int = 0
    """Priority class: higher goes first, in admission and on a group."""
    gang: int = 0
    """Number of deployments that get GPUs together or not at all; 0: each gets its own."""
    expected_s: float = 0.0
    """Length that the user expects; 0: unknown."""
    usual_s: float = 0.0
    """Length of earlier jobs of its tenant and name, rounded to a power of two; 0: unknown."""
    placed_at: float | None = None
    """When it got its first GPUs; None: not yet."""
    slo: float | None = None
    """Greatest waiting / (waiting + running) that it accepts, its tenant's at its submission if it
    named none; None: the cluster's `waiting_part_max`. 0: its deployments share with nobody."""
    controller: str = ""
    """Token of its present controller; empty: none was named."""
    user: str = ""
    """Who submitted it; empty: nobody in particular."""
    keys: list[str] = field(default_factory=list)
    """Digests of the API keys of this job alone, oldest first."""
    halts_on_failure: bool = False
    """A failed mutation halts its deployment until the controller acknowledges it."""
    deployments: list[DeploymentId] = field(default_factory=list)
    """Until the job ends, without those that were ended before."""
    ended_deployments: list[DeploymentId] = field(default_factory=list)
    """The deployments that were ended before the job."""
    usage: dict[OperationKind, UsageRow] = field(default_factory=dict)
    """Use by kind of operation."""
    sharing: Sharing = field(default_factory=Sharing)
    quote: JobQuote | None = None
    """What it was told before its submission; None: nothing."""
    fork: ForkView | None = None
    """Where it comes from; None: it is no fork."""


RATIO_BOUNDS = (0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 4.0, 8.0)
"""Upper bounds of the histogram of actual by estimated waits."""


@dataclass(slots=True)
class EtaErrors:
    """Errors of estimated waiting times, in seconds."""

    waits: int = 0
    """Bursts that had to wait; only some of these waits were estimated."""
    count: int = 0
    """Estimates that were compared."""
    absolute_s: float = 0.0
    """Sum of absolute errors."""
    late_s: float = 0.0
    """Sum of errors of waits that were longer than estimated."""
    slipped: int = 0
    """Waits that were more than twice as long as estimated, and at least 1 s longer."""
    early: int = 0
    """Starts before the estimate's interval."""
    late: int = 0
    """Starts after it."""
    ratios: list[int] = field(default_factory=lambda: [0] * (len(RATIO_BOUNDS) + 1))
    """Waits by (actual + 1 s) / (estimated + 1 s): up to each of `RATIO_BOUNDS`, and above."""
    ratio_sum: float = 0.0
    """Sum of these ratios."""
    newest: list[float] = field(default_factory=list)
    """Errors of the newest estimates, oldest first (`demand.wait_intervals`)."""


@dataclass(slots=True, kw_only=True)
class ForgottenJobs:
    """Totals of a tenant's jobs that were dropped from the state."""

    jobs: int = 0
    operations: int = 0
    """Operations of these jobs."""


@dataclass(slots=True)
class State:
    """The whole state of the scheduler core."""

    nodes: dict[NodeId, Node] = field(default_factory=dict)
    routers: list[RouterId] = field(default_factory=list)
    tenants: dict[TenantId, Tenant] = field(default_factory=dict)
    held: dict[TenantId, HeldTime] = field(default_factory=dict)
    in_flight: dict[TenantId, InFlight] = field(default_factory=dict)
    jobs: dict[JobId, Job] = field(default_factory=dict)
    ended: dict[JobId, None] = field(default_factory=dict)
    """Jobs that have ended, in the order of their ends."""
    forgotten: dict[TenantId, ForgottenJobs] = field(default_factory=dict)
    retired: dict[DeploymentId, int] = field(default_factory=dict)
    """Last incarnation of the newest dropped deployments, oldest first."""
    retired_incarnation: int = 0
    """Highest incarnation of all older dropped deployments."""
    deployments: dict[DeploymentId, Deployment] = field(default_factory=dict)
    groups: dict[GroupId, Group] = field(default_factory=dict)
    profiles: dict[str, DemandTrace] = field(default_factory=dict)
    """Measured demand of earlier deployments, by the properties that a later one must share."""
    shapes: dict[str, ShapeDemand] = field(default_factory=dict)
    """Measured demand of all tenants' deployments by their shape (`accounting.earlier_jobs`)."""
    lengths: dict[str, float] = field(default_factory=dict)
    """How long jobs took from their first GPUs to their end, by tenant and name: a moving average,
    oldest first."""
    move_laws: dict[str, MoveLaw] = field(default_factory=dict)
    """Cost models of moves, by kind of move, tier and node type."""
    operations: dict[OperationId, Operation] = field(default_factory=dict)
    finished: dict[int, OperationId] = field(default_factory=dict)
    """Newest finished operations by their index in the operation log, oldest first."""
    finished_count: int = 0
    eta_errors: EtaErrors = field(default_factory=EtaErrors)
    searches: dict[str, int] = field(default_factory=dict)
    """Number of failed searches of the groups' time since capacity became free, by size."""
    reservations: dict[DeploymentId, ReservedStart] = field(default_factory=dict)
    """The reserved starts of deployments that still wait."""
    timers_swept: int = 0
    """Timers that were left after the last removal of pointless ones."""
    groups_made: int = 0
    jobs_made: int = 0
    deployments_made: int = 0
    former_switches: int = 0
    """Context switches of groups that were removed."""
    moves_made: int = 0
    tokens_made: int = 0
    """Highest token of any group so far."""
    history: int = 0
    """Number of finished operations that are kept; like `ended_jobs`, a setting that is looked up
    with every event."""
    ended_jobs: int = 0
    """Number of ended jobs that are kept."""
    overdue_s: float = 0.0
    """The least bound of a run, likewise a setting; 0: runs have no bound."""
    issued_at: float = 0.0
    """When all runs were last sent again, or reports could arrive again: bounds count from then."""
    resumed_at: float = 0.0
    """When heartbeats could last arrive again: nobody was silent before."""

    def job(self, name: JobId) -> Job:
        return self.jobs[name]

    def deployment(self, name: DeploymentId) -> Deployment:
        return self.deployments[name]

    def group_of(self, deployment: Deployment) -> Group | None:
        """The group of a deployment's first ranks; None while it waits for GPUs, and after its
        end."""
        return self.groups[deployment.placement.groups[0]] if deployment.placement.groups else None

    def groups_of(self, deployment: Deployment) -> list[Group]:
        """All groups of a deployment, in the order of its ranks."""
        names, groups = deployment.placement.groups, self.groups
        if len(names) == 1:
            # By far the most are on one group.
            return [groups[names[0]]]
        return [groups[name] for name in names]
