"""The result of a simulated run, bounded in size. All but `Speed` follows from the scenario.
Pure."""

from dataclasses import dataclass, field

from plexrl.sim.results.gpu_hours import GpuHours, Tail

CDF_POINTS = 200
SERIES_BINS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionSummary:
    """Distribution of a quantity over jobs or cycles; quantiles are correct to a relative 1 %."""

    count: int
    mean: float
    median: float
    p95: float
    p99: float
    highest: float
    cdf: tuple[tuple[float, float], ...] = ()
    """(value, part of all at most this value), ascending, at most `CDF_POINTS` points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantResult:
    """Usage and waits of one tenant."""

    tenant: str
    jobs: int
    gpu_hours: float
    """Billed GPU-hours: of its operations and the switches that they caused."""
    rollout_gpu_hours: float
    wait_mean_s: float
    slowdown_mean: float
    """Mean over its jobs of the time from submission to end, relative to the duration alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An interval in which a job held a group."""

    group: str
    job: str
    kind: str
    """`run`, `load` or `offload`."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainBounds:
    """Lower bounds of the drain time for any scheduler; the larger one applies."""

    critical_path_s: float
    """Latest end of any job that starts at its submission, never waits, and moves no state."""
    area_s: float
    """Work by release time, divided by all GPUs: of training, and of rollouts that are placed."""

    @property
    def bound_s(self) -> float:
        """Seconds from the trace's start."""
        return max(self.critical_path_s, self.area_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed of the simulation itself: the only part that differs between equal runs."""

    wall_s: float
    events_per_s: float
    """Events per second that the core handled."""
    peak_bytes: int
    """Peak resident memory of the process."""
    compiled: bool = False
    """Whether core and event loop were C extensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """The result of one run."""

    policy: str
    gpus: int
    """GPUs of the cluster."""
    places_rollouts: bool = False
    """Whether rollouts ran on them too."""
    jobs: int
    """Ended jobs, completed or failed."""
    failed_jobs: int
    jobs_over_slo: int = 0
    """Completed jobs that waited on their GPUs for a greater part of their time than they accept:
    by the scenario's `slo`, else their own, else the scheduler's default."""
    cycles: int
    events: int
    """Events that the core handled."""
    switches: int
    drain_s: float
    """From the trace's start to the end of the last job."""
    bounds: DrainBounds
    wait: DistributionSummary
    """Seconds from a job's submission to its first placement."""
    normalized_wait: DistributionSummary
    """wait / duration on GPUs of its own (PlexRL Fig. 8)."""
    job_slowdown: DistributionSummary
    """(end - start) / duration on GPUs of its own - 1; the start is the first placement. A duration
    on GPUs of its own is without moves of state, here and below: a schedule can hide them."""
    completion: DistributionSummary
    """(end - submission) / duration on GPUs of its own."""
    cycle_slowdown: DistributionSummary
    """Duration of a cycle / duration of the same drawn cycle on a group of its own - 1. Below 0 for
    a cycle of an asynchronous job that catches up after a delay."""
    training_gpu_hours: float
    """GPU-hours of GPUs in groups for training."""
    busy_gpu_hours: float
    """GPU-hours of running training operations, and of rollouts that are placed."""
    switch_gpu_hours: float
    """GPU-hours of running loads and offloads."""
    filled_gpu_hours: float = 0.0
    """GPU-hours of useful generation by preemptible deployments."""
    where: GpuHours = field(default_factory=GpuHours)
    """Where all GPU-hours of the cluster went."""
    tail: Tail = field(default_factory=Tail)
    """The end of the run, in which no job waits for its first GPUs."""
    rollout_gpu_hours: float
    """GPU-hours of GPUs in groups for rollouts, or of rollout GPUs outside of the cluster."""
    rollout_gpus_peak: int = 0
    """Most rollout GPUs in use at the same time."""
    cost: float
    """Total cost: reserved nodes for `paid_s`, on-demand nodes while groups hold them, and rollout
    GPUs while their jobs run."""
    rollout_cost: float = 0.0
    """Part of the cost for rollout GPUs."""
    on_demand_cost: float = 0.0
    """Part of the cost for on-demand nodes."""
    reserved_nodes: int = 0
    """All nodes, unless the scenario has an on-demand price."""
    paid_s: float = 0.0
    """Paid time of reserved nodes: the horizon, or `drain_s` if that is longer."""
    nodes_held: tuple[tuple[int, float], ...] = ()
    """(number of nodes held by groups, hours), ascending."""
    gpu_hours_per_cycle: float
    """GPU-hours per cycle: training and rollout, as held."""
    utilisation: tuple[tuple[float, float, float], ...]
    """(start of the bin in s, part of the GPUs in groups, part that is busy), at most `SERIES_BINS`
    bins."""
    tenants: tuple[TenantResult, ...]
    worst_tenant: float
    """The greatest of the tenants' mean slowdowns: 1 if no job of any tenant waits or is slowed."""
    spans: tuple[Span, ...]
    """Spans within the scenario's window, in the order of their ends."""
    spans_left_out: int = 0
    """Number of spans beyond the limit."""
    failures: int
    """Losses of nodes and workers."""
    speed: Speed
