"""What a simulated run comes to. Bounded in size whatever the length of the trace; all but `Speed`
follows from the scenario alone. Pure.
"""

from dataclasses import dataclass

CDF_POINTS = 200
SERIES_BINS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of some quantity over jobs or cycles; exact moments, quantiles to a relative 1 %."""

    count: int
    mean: float
    median: float
    p95: float
    p99: float
    highest: float
    cdf: tuple[tuple[float, float], ...] = ()
    """(value, part of all that is at most so), ascending, at most `CDF_POINTS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantResult:
    """What one tenant got."""

    tenant: str
    jobs: int
    gpu_hours: float
    """Training GPUs held by its operations and the switches they caused: what it is billed for."""
    rollout_gpu_hours: float
    wait_mean_s: float
    slowdown_mean: float
    """Of its jobs: time from submission to end, by that on GPUs of its own without waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch in which a job held a group."""

    group: str
    job: str
    kind: str
    """`run`, `load` or `offload`."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What no scheduler can beat: the larger of the two is the lower bound of the drain time."""

    critical_path_s: float
    """Latest end of any job that starts at its submission and never waits."""
    area_s: float
    """Work of the training GPUs, released as it comes, over all of them."""

    @property
    def bound_s(self) -> float:
        """Seconds from the trace's start."""
        return max(self.critical_path_s, self.area_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast the run went: the only part that differs from run to run."""

    wall_s: float
    events_per_s: float
    """Through the core."""
    peak_bytes: int
    """Resident memory of the process."""
    compiled: bool = False
    """Whether core and loop were C extensions, or Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """One run."""

    policy: str
    gpus: int
    jobs: int
    """That ended, completed or not."""
    failed_jobs: int
    """Of these, those that the core gave up."""
    cycles: int
    events: int
    """Told to the core."""
    switches: int
    drain_s: float
    """From the trace's start to the end of the last job."""
    bounds: Bounds
    wait: Distribution
    """Of jobs, submission to first placement, seconds."""
    normalized_wait: Distribution
    """wait / duration on GPUs of its own (PlexRL Fig. 8)."""
    job_slowdown: Distribution
    """(end - start) / duration on GPUs of its own - 1; the start is the first placement."""
    completion: Distribution
    """(end - submission) / duration on GPUs of its own."""
    cycle_slowdown: Distribution
    """A cycle's seconds by those of the same drawn cycle on a group of its own, minus 1."""
    training_gpu_hours: float
    """Of GPUs that some group had."""
    busy_gpu_hours: float
    """Of these, with a training operation running."""
    switch_gpu_hours: float
    """Of these, with a load or an offload running."""
    rollout_gpu_hours: float
    rollout_gpus_peak: int = 0
    """Most rollout GPUs that jobs had at one time."""
    cost: float
    """Reserved nodes for `paid_s`, on-demand nodes as long as groups held them, and rollout GPUs as
    long as their jobs ran."""
    rollout_cost: float = 0.0
    """Of these, the rollout GPUs'."""
    on_demand_cost: float = 0.0
    """Of these, the on-demand nodes'."""
    reserved_nodes: int = 0
    """All nodes, unless the scenario has an on-demand price."""
    paid_s: float = 0.0
    """How long reserved nodes are paid: the horizon, or `drain_s` where that is longer."""
    nodes_held: tuple[tuple[int, float], ...] = ()
    """(nodes that groups held at once, hours for which that many were held), ascending."""
    gpu_hours_per_cycle: float
    """Training (as held by groups) and rollout."""
    utilisation: tuple[tuple[float, float, float], ...]
    """(start of the bin in s, part of the cluster's GPUs in groups, part that trains), at most
    `SERIES_BINS`."""
    tenants: tuple[TenantResult, ...]
    fairness: float
    """Jain's index over tenants' mean slowdowns: 1 is equal."""
    spans: tuple[Span, ...]
    """Of the scenario's window, in the order of their ends."""
    spans_left_out: int = 0
    """There were more than a result can hold."""
    failures: int
    """Nodes and workers lost."""
    speed: Speed
