"""Views for an operator's page: GPUs by state, who waits, lanes of the groups, shares and bills.

Times (`now`, `since`, `until`) are seconds on the scheduler's clock. An answer to a tenant has its
own jobs only.
"""

from typing import Final, NotRequired, TypedDict

from plexrl.ids import DeploymentId, GroupId, JobId, OperationId, TenantId
from plexrl.process.conditions import ConditionView
from plexrl.wire.messages.cluster_views import EtaQualityView

COMPUTING: Final = "computing"
SWITCHING: Final = "switching"
IDLE: Final = "idle"
"""In a group, and nothing runs on them."""
OTHERS: Final = "others"
"""For a tenant: in groups of which it has no member."""
FREE: Final = "free"
DRAINING: Final = "draining"
"""In no group, on a node that takes no new work."""
LOST: Final = "lost"
"""On a node whose agent is not connected."""
GPU_STATES: Final = (COMPUTING, SWITCHING, IDLE, OTHERS, FREE, DRAINING, LOST)

LANES_MAX: Final = 64
"""Most lanes of one answer; with more groups it has bands, too."""
SPANS_PER_LANE: Final = 300
"""About so many spans fit side by side on a screen; shorter ones are merged."""
BAND_CELLS: Final = 120
"""Cells in time of each band."""
QUEUE_PAGE_MAX: Final = 100
BLOCKS_MAX: Final = 256
WORK: Final = 0
SWITCH: Final = 1
"""A move of state."""
STORED: Final = 2
"""A run on stored state, which used no GPU: the group was another member's meanwhile."""
SEVERAL_JOBS: Final = -1
"""In place of a job's index: a span of several jobs, each too short to be drawn."""


class GpuCounts(TypedDict):
    """GPUs of the cluster, or of one type of nodes."""

    node_type: str
    gpus: int
    states: dict[str, int]
    """Number by state, of `GPU_STATES`; absent: there is none."""


class BlockCounts(TypedDict):
    """GPUs of the nodes of one block of the topology."""

    block: str
    """Empty: of nodes that name none."""
    gpus: int
    states: dict[str, int]
    """As in `GpuCounts`."""


class TierBytes(TypedDict):
    """Bytes of states, by where they lie. A state on GPUs may also be stored, and counts twice."""

    gpu: int
    host: int
    """Pinned host memory of the StateManagers."""
    nvme: int
    """What NVMe alone holds."""


class JobMemoryView(TypedDict):
    """Where the state of one deployment lies."""

    deployment: DeploymentId
    bytes: TierBytes


class OperationTotalsView(TypedDict):
    """Operations of one kind that ended in one state since the scheduler's start; seconds are sums.
    An operation that ended before this is not counted."""

    kind: str
    state: str
    operations: int
    tokens: int
    queue_s: float
    """In queues, without context switches."""
    switch_s: float
    """Waiting during context switches."""
    run_s: float
    """From their starts to their ends."""


class JournalView(TypedDict):
    """The scheduler's journal."""

    events: int
    """Position of the last event."""
    events_to_replay: int
    """Events after the last snapshot, which a restart replays."""
    is_held: bool
    """Whether it takes no events now."""
    waiting_events: int
    """Events that wait to be written."""


class OverviewView(TypedDict):
    """The cluster at one moment."""

    now: float
    gpus: GpuCounts
    node_types: list[GpuCounts]
    """Likewise by type of nodes, sorted by its name."""
    blocks: list[BlockCounts]
    """Likewise by block, if nodes name any; the first `BLOCKS_MAX` by name."""
    memory: TierBytes
    """Bytes of the states of the deployments that have GPUs."""
    nodes: int
    groups: int
    """Node groups that exist; for a tenant those where it has a member."""
    jobs_live: int
    waiting: int
    """Deployments that wait for GPUs, without those that can never get any."""
    impossible: int
    """Deployments that ask for more than the nodes in service can give."""
    waiting_since: float | None
    """Creation of the oldest deployment in `waiting`; None: none waits."""
    turns: int
    """Deployments that have GPUs and wait for their turn on them."""
    turns_since: float | None
    """Submission of the oldest operation of these; None: none waits."""
    eta_quality: EtaQualityView
    """Errors of the estimated starts."""
    switches: NotRequired[int]
    """Context switches so far; for operators only, as are the next fields."""
    switch_seconds: NotRequired[float]
    """What those of the present groups took."""
    operations: NotRequired[list[OperationTotalsView]]
    journal: NotRequired[JournalView]


class ClusterOverview(OverviewView):
    """The cluster at one moment, with its health as the router sees it."""

    conditions: list[ConditionView]
    restarts: int
    last_restart_at: float | None
    """Seconds since the epoch; None: no part was restarted."""


class QueuedView(TypedDict):
    """One waiting deployment."""

    position: int
    """From 1, over all that wait in the same list, other tenants' included."""
    deployment: DeploymentId
    job: JobId
    name: str
    """The job's."""
    tenant: TenantId
    operation: OperationId | None
    """The operation that waits; None: the deployment waits for GPUs."""
    kind: str
    """The operation's kind, or the deployment's."""
    gpus: int
    priority: int
    since: float
    rule: str
    """As in `ExplanationView`."""
    reason: str
    blocker: str | None
    """What it waits behind: a deployment, by its name if the caller may see it; None: nothing that
    can be named."""
    eta_s: float | None
    """None: unknown."""
    eta_low_s: float | None
    """It starts between this and `eta_high_s` in 80 % of the cases; None: unknown."""
    eta_high_s: float | None


class QueueView(TypedDict):
    """One page of a list of waiting deployments, in the order in which they go."""

    now: float
    total: int
    """Entries of the list that the caller may see."""
    first: int
    """Index of the first row, from 0."""
    rows: list[QueuedView]


class LaneJobView(TypedDict):
    """A job of which lanes have spans."""

    job: JobId
    name: str
    tenant: TenantId


Span = tuple[float, float, int, int]
"""Start and end in seconds after `since`, the job's index in `jobs` or `SEVERAL_JOBS`, and `WORK`,
`SWITCH` or `STORED`."""


class LaneView(TypedDict):
    """One group, and the jobs that had its GPUs."""

    group: GroupId
    gpus: int
    node_type: str
    members: int
    is_gone: bool
    """It exists no longer, or the caller has no member in it any more."""
    spans: list[Span]


class BandView(TypedDict):
    """Neighbouring groups together."""

    first: int
    """Index of the first group."""
    groups: int
    busy: str
    """A digit for each of `BAND_CELLS` cells: tenths of the GPUs' time in which work or a switch
    ran, rounded down; 9 is also all of it."""


class LanesView(TypedDict):
    """Lanes of groups over a window of time."""

    since: float
    until: float
    oldest: float | None
    """Where the history begins: before that nothing is known. None: nothing has run yet."""
    gaps: list[tuple[float, float]]
    """Parts of the window of which nothing is known, in seconds after `since`."""
    groups: int
    """Groups that the caller may see, and that exist or had runs in the window."""
    first: int
    """Index of the first lane's group."""
    jobs: list[LaneJobView]
    lanes: list[LaneView]
    bands: list[BandView]
    """Of all groups, if there are more than `LANES_MAX`."""


class TenantShareView(TypedDict):
    """What one tenant is due, has, and has paid."""

    tenant: TenantId
    weight: float
    due: float
    """Its part of the weights of the tenants that have live jobs, from 0 to 1; 0: it has none."""
    held: float
    """Its part of what all tenants hold. A GPU that several jobs share counts for each."""
    gpus_held: int
    gpus_max: int | None
    jobs_running: int
    jobs_max: int | None
    live_jobs: int
    live_jobs_max: int | None
    gpu_seconds: float
    gpu_seconds_max: float | None
    remembered_gpu_seconds: float
    """GPU time of the jobs that are remembered; likewise the next fields."""
    switch_gpu_seconds: float
    """Moves of state."""
    saved_gpu_seconds: float
    """What sharing saved; negative: sharing cost more than it saved."""
    operations: int
    failed: int


class SharesView(TypedDict):
    """Tenants' shares, the one with most GPU time first."""

    now: float
    tenants: list[TenantShareView]


class TimesView(TypedDict):
    """Where the time of one deployment's operations of one kind went; sums in seconds."""

    deployment: DeploymentId
    kind: str
    operations: int
    failed: int
    queue_s: float
    switch_s: float
    transfer_s: float
    compute_s: float
    other_s: float
    """From start to end, without transfer and computation; of moves all of it."""


class JobTimesView(TypedDict):
    """Where the time of a job's operations in the history went."""

    job: JobId
    since: float | None
    """Submission of the oldest of them; None: none has finished."""
    memory: list[JobMemoryView]
    """Where the states of its deployments lie now."""
    rows: list[TimesView]


class PlanView(TypedDict):
    """The plan of a cluster with one more job, for the process that simulates it."""

    plan: str
    """JSON of `scheduler.queries.overview.planned_jobs.ClusterPlan`; routers pass it on unread."""


class DelayedJobView(TypedDict):
    """A job that ends later because of the quoted one."""

    job: JobId
    name: str
    delay_s: float
    slowdown: float
    """Delay by the time that it would still take; 0.1: 10 % longer."""


class DelayedOthersView(TypedDict):
    """Delayed jobs of other tenants, without names."""

    jobs: int
    delay_s: float
    """Sum of their delays."""


class QuoteFiguresView(TypedDict):
    """One way to submit a job. Seconds count from now; each event is between its low and its high
    in 80 % of the cases."""

    way: str
    start_s: float
    start_low_s: float
    start_high_s: float
    end_s: float
    end_low_s: float
    end_high_s: float
    gpus: int
    """Of its training and rollouts together."""
    gpu_hours: float
    """GPU time that it will be billed for."""
    cost: float | None
    """`gpu_hours` times the price; None: no price was given."""
    slowdown: float
    """From its first GPUs to its end, by the same time on GPUs of its own, less 1."""
    delayed: list[DelayedJobView]
    """Own jobs that end later, those with the longest delay first."""
    others: DelayedOthersView


class QuoteView(TypedDict):
    """The answer to a request for a quote. Nothing was submitted."""

    asked: QuoteFiguresView
    alternatives: list[QuoteFiguresView]
    knowledge: str
    """Where the demand of the job is from: `measured`, `like others`, `declared`, `unknown`."""
    errors: int
    """Earlier quotes whose errors give the intervals; below 9 they are wide guesses."""
    live_jobs: int
    runs: int
    """Simulated futures."""
    is_cut: bool
    """The future is longer than a quote simulates: ends follow from the cycles until there."""
