"""All inputs of one simulated run: equal scenarios give equal results, byte for byte. Pure.

Scenarios are plain frozen values, so that a run can execute in any process.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from plexrl.errors import InvalidRequestError
from plexrl.latency.gpus import HOST_LINK, MOVE_FIXED_S, NVME_RATE
from plexrl.sim.workload.prices import Prices
from plexrl.traces import TraceJob

GIB = 1 << 30
TIB = 1 << 40

NODES_MAX = 10_000
"""Most nodes of a pool; more are a mistake and would take minutes to join."""
JITTER_MAX = 3.0
"""At this jitter one cycle in a thousand takes 10 000 times the median; 15 for 15 % is a
mistake."""
STALENESS_MAX = 64
"""Most steps of staleness; no training uses older rollouts."""
RESPONSES_MAX = 1_000_000
"""Most responses of a rollout; the distribution of the longest is exact up to here."""
LOAD_MAX = 100.0
"""Largest bound of a group's load; a hundred jobs that always train are a mistake."""
SLO_MAX = 0.99
"""Largest part of its time that a job may accept to wait, as in a trace."""
STARVATION_S_MAX = 1e9
"""Longest starvation bound: no job waits as long, so none has a reservation."""
SWITCH_S_MAX = 86_400.0
"""Longest context switch."""
AMOUNT_MAX = 1e12
"""Largest number of seconds; beyond it clocks are coarser than a tenth of a millisecond."""
BETWEEN_FAILURES_S_MIN = 1.0
"""Below this no work ever completes."""


class JobSource(Protocol):
    """The source of a scenario's jobs. Picklable."""

    def jobs(self) -> Iterator[TraceJob]:
        """The jobs in order of submission; every call returns equal jobs from the first on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Sizes, rates and price of a node. The defaults are of an H200 node with pinned host memory
    (PCIe 5, 8 NVMe drives)."""

    name: str = "h200"
    gpus: int = 8
    gpu_memory_bytes: int = 141 * GIB
    """Memory of each GPU."""
    host_memory_bytes: int = 2 * TIB
    nvme_bytes: int = 28 * TIB
    host_bytes_per_s: float = HOST_LINK
    """Rate between a GPU and host memory, per GPU."""
    nvme_bytes_per_s: float = NVME_RATE
    """Rate between host memory and NVMe, per node."""
    network_bytes_per_s: float = 50e9
    """Network rate, per node."""
    move_fixed_s: float = MOVE_FIXED_S
    """Fixed seconds of each move, whatever its size."""
    speed: float = 1.0
    """Speed of training work relative to the trace's nodes."""
    price: float = 2.5
    """Price of a GPU-hour unless the scenario's prices replace it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal nodes of a cluster. Rollouts run outside of it, unless the scenario places them."""

    nodes: int
    node_type: NodeType = field(default_factory=NodeType)
    nodes_per_block: int = 16
    """Nodes per block of the network topology."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.nodes_per_block < 1:
            raise InvalidRequestError(
                f"a pool has at least 1 node, and so has a block: not {self.nodes} and "
                f"{self.nodes_per_block}"
            )
        if self.nodes > NODES_MAX:
            raise InvalidRequestError(f"a pool has at most {NODES_MAX} nodes, not {self.nodes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStalls:
    """Delays of rollouts that wait for tools."""

    chance: float
    """Probability that a cycle has a stall."""
    mean_s: float
    sigma: float = 1.0
    """Standard deviation of the logarithm of its seconds."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.chance <= 1.0 and _is_amount(self.mean_s) and _is_amount(self.sigma)):
            raise InvalidRequestError(
                "tool stalls have a chance of 0 to 1, a mean and a sigma of at least 0: not "
                f"{self.chance:g}, {self.mean_s:g} s and {self.sigma:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How the jobs' cycles differ from their profiles."""

    jitter: float | None = None
    """Sigma of the logarithms of a rollout's seconds and of a cycle's training work; absent: from
    each job's trace row (`jitter_s / period_s`)."""
    correlation: float = 0.5
    """Correlation of these two: long rollouts have many tokens."""
    responses: int = 0
    """Responses per rollout; the longest determines its end. 0: a rollout's seconds are lognormal
    with `jitter`."""
    lengths: str = "r1"
    """Distribution of response lengths: `r1` (bundled) or the path of a trace of lengths."""
    stalls: ToolStalls | None = None
    staleness: int | None = None
    """Steps that rollouts may run ahead of training; absent: from each job's trace row."""
    controller_s: float = 0.01
    """Controller time between an answer and the submission of the next operation."""

    def __post_init__(self) -> None:
        if not -1.0 <= self.correlation <= 1.0:
            raise InvalidRequestError(f"a correlation is -1 to 1, not {self.correlation:g}")
        given = (self.jitter or 0.0, self.responses, self.staleness or 0, self.controller_s)
        if not all(map(_is_amount, given)):
            raise InvalidRequestError(
                "jitter, responses, staleness and controller_s are at least 0: not "
                f"{self.jitter}, {self.responses}, {self.staleness} and {self.controller_s:g}"
            )
        if (self.staleness or 0) > STALENESS_MAX or self.responses > RESPONSES_MAX:
            raise InvalidRequestError(
                f"staleness is at most {STALENESS_MAX} steps and a rollout has at most "
                f"{RESPONSES_MAX:,} responses: not {self.staleness} and {self.responses}"
            )
        if self.jitter is not None and self.jitter > JITTER_MAX:
            raise InvalidRequestError(
                f"a jitter of {self.jitter:g} is more than {JITTER_MAX:g}: it is a part of a "
                "cycle, 0.15 for 15 %"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failure rates of Poisson processes; 0 s: never."""

    node_mtbf_s: float = 0.0
    """Mean time between failures of one node."""
    repair_s: float = 1800.0
    worker_mtbf_s: float = 0.0
    """Mean time between failures of one WPG's processes."""
    state_survives: float = 1.0
    """Part of lost nodes that rejoin with their host memory, because only an agent or the network
    failed. The others rejoin with their NVMe only. A job whose state is lost fails; its user would
    resume from a checkpoint."""

    def __post_init__(self) -> None:
        if not all(map(_is_amount, (self.node_mtbf_s, self.repair_s, self.worker_mtbf_s))):
            raise InvalidRequestError(
                "times between failures and of repairs are at least 0 s: not "
                f"{self.node_mtbf_s:g}, {self.repair_s:g} and {self.worker_mtbf_s:g}"
            )
        if any(
            0.0 < each < BETWEEN_FAILURES_S_MIN for each in (self.node_mtbf_s, self.worker_mtbf_s)
        ):
            raise InvalidRequestError(
                f"times between failures are at least {BETWEEN_FAILURES_S_MIN:g} s, or 0 for "
                f"never: not {self.node_mtbf_s:g} and {self.worker_mtbf_s:g}"
            )
        if not 0.0 <= self.state_survives <= 1.0:
            raise InvalidRequestError(
                f"state_survives is a part, 0 to 1, not {self.state_survives:g}"
            )


Detail = Literal["burst", "operation"]

RolloutGpus = Literal["outside", "own", "shared", "automatic"]
"""Where rollouts run. `outside` of the cluster, never short. On GPUs of the cluster, placed by the
scheduler together with the training: on their `own`; `shared` with the training and with other
deployments as the policy decides (`shares_gpus`); `automatic`: shared where GPUs are scarce."""
ROLLOUT_GPUS: tuple[RolloutGpus, ...] = get_args(RolloutGpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The inputs of one run."""

    source: JobSource
    pools: tuple[Pool, ...]
    policy: str = "spread+backfill"
    """A name of `plexrl.sim.workload.policies`."""
    seed: int = 0
    behaviour: Behaviour = field(default_factory=Behaviour)
    failures: Failures = field(default_factory=Failures)
    warm: bool = True
    """Jobs declare their demand at submission; otherwise the scheduler profiles each job."""
    rollouts: RolloutGpus = "outside"
    """Where rollouts run."""
    fills_valleys: bool = False
    """Preemptible deployments generate in the idle time of all shared groups, without end."""
    longest_first: bool = False
    """Waiting jobs get GPUs by their length, the longest first."""
    mixed_sizes: bool | None = None
    """Whether deployments of different sizes share GPUs; absent: as the policy's default."""
    starvation_bound_s: float | None = None
    """Wait after which a job has a reservation; absent: the scheduler's default."""
    load_max: float | None = None
    """Largest sum of the duties of a group's members; absent: the scheduler's default."""
    slo: float | None = None
    """Greatest part of its time that each job accepts to wait for others on its GPUs; absent: from
    its trace row, else the scheduler's default."""
    launch_s: float = 30.0
    """Start time of a job's workers: imports, process groups, building the model."""
    switch_s: float | None = None
    """Duration of a context switch, half for each move; absent: by the node type's rates."""
    control_s: float = 0.0
    """Control-plane overhead of each operation. Workers do not measure it, so the scheduler's
    estimates exclude it. It matters for short operations."""
    detail: Detail = "burst"
    """`burst`: adjacent segments of a cycle are one operation; `operation`: each segment is one."""
    check: bool = False
    """Check the invariants during the run."""
    window_s: tuple[float, float] | None = None
    """Time window whose spans are kept for a Gantt chart."""
    prices: Prices = field(default_factory=Prices)
    """Prices; they affect no decision."""

    def __post_init__(self) -> None:
        self._check_prices()
        given = {"launch_s": self.launch_s, "control_s": self.control_s}
        if self.load_max is not None and not 0.0 < self.load_max <= LOAD_MAX:
            raise InvalidRequestError(
                f"the load of a group is above 0 and at most {LOAD_MAX:g}, not {self.load_max:g}"
            )
        if self.slo is not None and not 0.0 <= self.slo <= SLO_MAX:
            raise InvalidRequestError(
                f"the part of its time that a job accepts to wait is 0 to {SLO_MAX:g}, not "
                f"{self.slo:g}"
            )
        if self.switch_s is not None:
            given["switch_s"] = self.switch_s
            if self.switch_s > SWITCH_S_MAX:
                raise InvalidRequestError(
                    f"a context switch takes at most {SWITCH_S_MAX:g} s, not {self.switch_s:g}"
                )
        for name, seconds in given.items():
            if not _is_amount(seconds):
                raise InvalidRequestError(f"{name} is a time of at least 0 s, not {seconds:g}")
        if self.window_s is not None:
            start_s, end_s = self.window_s
            if not (_is_amount(start_s) and _is_amount(end_s) and start_s < end_s):
                raise InvalidRequestError(
                    f"a window ends after its start, which is at least 0 s: not {start_s:g} to "
                    f"{end_s:g}"
                )

    def _check_prices(self) -> None:
        prices = self.prices
        if prices.on_demand is not None and len(self.pools) > 1:
            raise InvalidRequestError(
                f"a price of on-demand nodes needs a cluster of one pool, and this one has "
                f"{len(self.pools)}: reserved nodes are not assigned to pools"
            )
        if prices.reserved_nodes is not None and prices.on_demand is None:
            nodes = prices.reserved_nodes
            raise InvalidRequestError(
                f"{nodes} reserved node{'s' if nodes != 1 else ''} without a price of the others: "
                "give the price of on-demand nodes (--price-on-demand)"
            )

    @property
    def places_rollouts(self) -> bool:
        """Whether rollouts run on GPUs of the cluster."""
        return self.rollouts != "outside"

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return sum(pool.nodes * pool.node_type.gpus for pool in self.pools)


def _is_amount(value: float) -> bool:
    """Whether the value is from 0 to `AMOUNT_MAX`, so neither NaN nor infinite."""
    return 0.0 <= value <= AMOUNT_MAX
