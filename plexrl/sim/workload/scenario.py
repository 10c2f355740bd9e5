"""What one simulated run depends on, and nothing else: equal scenarios have equal results, to the
byte. Plain frozen values, so that a run can be carried out in any process. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from plexrl.errors import InvalidRequestError
from plexrl.sim.workload.prices import Prices
from plexrl.traces import TraceJob

GIB = 1 << 30
TIB = 1 << 40

NODES_MAX = 10_000
"""Of a pool: more are a slip, and would take minutes to join."""
JITTER_MAX = 3.0
"""Where a cycle in a thousand takes ten thousand times the median; 15 for 15 % is a slip."""
STALENESS_MAX = 64
"""Steps: training on rollouts that old is not what anybody does."""
RESPONSES_MAX = 1_000_000
"""Of a rollout: the law of the longest is exact up to here."""
GPUS_PER_NODE_MAX = 1024
SWITCH_S_MAX = 86_400.0
"""Of a context switch."""
AMOUNT_MAX = 1e12
"""Of seconds, some 30 000 years: clocks are no finer than a tenth of a millisecond there."""
BETWEEN_FAILURES_S_MIN = 1.0
"""Where it is less, nothing ever gets done."""


class JobSource(Protocol):
    """Where a scenario's jobs come from. Can be pickled."""

    def jobs(self) -> Iterator[TraceJob]:
        """The jobs in order of submission, from the first, each time anew and the same."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """A kind of node: what its moves take, and what it costs. The rates are those of one H200 node
    with pinned host memory (PCIe 5, 8 NVMe drives)."""

    name: str = "h200"
    gpus: int = 8
    gpu_memory_bytes: int = 141 * GIB
    """Per GPU."""
    host_memory_bytes: int = 2 * TIB
    nvme_bytes: int = 28 * TIB
    host_bytes_per_s: float = 50e9
    """Between a GPU and host memory, per GPU."""
    nvme_bytes_per_s: float = 20e9
    """Between host memory and NVMe, per node."""
    network_bytes_per_s: float = 50e9
    """Between nodes, per node."""
    move_fixed_s: float = 0.5
    """Of each move, whatever its size."""
    speed: float = 1.0
    """Of training work, by that of the trace's nodes."""
    price: float = 2.5
    """Of a GPU-hour, where the scenario's prices say nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal nodes of a cluster, for training. Rollouts run on GPUs of their own, outside."""

    nodes: int
    node_type: NodeType = field(default_factory=NodeType)
    nodes_per_block: int = 16
    """Neighbours in the topology."""

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
    """Rollouts that wait for tools."""

    chance: float
    """Of a cycle to have one."""
    mean_s: float
    sigma: float = 1.0
    """Of the logarithm of its seconds."""

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
    """Sigma of the logarithm of a rollout's seconds and of a cycle's training work; absent: as each
    job's trace row has it (`jitter_s / period_s`)."""
    correlation: float = 0.5
    """Of the two: long rollouts have many tokens."""
    responses: int = 0
    """Responses of a rollout, of which the longest decides when it ends, with lengths of the
    `lengths` law; 0: a rollout's seconds are lognormal by `jitter`."""
    lengths: str = "r1"
    """Law of response lengths: `r1` (bundled) or the path of a trace of response lengths."""
    stalls: ToolStalls | None = None
    staleness: int | None = None
    """Steps that rollouts may run ahead; absent: as each job's trace row has it."""
    controller_s: float = 0.01
    """From an answer to the submission of the next operation."""

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
    """What breaks, as Poisson processes; 0 s: never."""

    node_mtbf_s: float = 0.0
    """Of one node."""
    repair_s: float = 1800.0
    worker_mtbf_s: float = 0.0
    """Of one WPG's processes."""
    state_survives: float = 1.0
    """Part of lost nodes that come back with what they had in host memory, because an agent or the
    network had failed. The others have what lay on NVMe; a job whose state is lost ends as failed,
    for its user to begin again from a checkpoint."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run."""

    source: JobSource
    pools: tuple[Pool, ...]
    policy: str = "spread+backfill"
    """A name of `plexrl.sim.workload.policies`."""
    seed: int = 0
    behaviour: Behaviour = field(default_factory=Behaviour)
    failures: Failures = field(default_factory=Failures)
    warm: bool = True
    """Jobs declare their demand when they are submitted, as those that came before would; otherwise
    the scheduler has to profile each."""
    launch_s: float = 30.0
    """Of a job's worker processes: imports, process groups, the model's build."""
    switch_s: float | None = None
    """Of a context switch, half each way; absent: by the node type's rates."""
    control_s: float = 0.0
    """Of each run, what is the control plane's: it takes that time, but workers do not count it, so
    the scheduler's estimates do not either. It matters where operations are that short."""
    detail: Detail = "burst"
    """`burst`: segments of a cycle that touch are one operation; `operation`: each is its own."""
    check: bool = False
    """Check the invariants all along."""
    window_s: tuple[float, float] | None = None
    """Whose spans are kept for a Gantt chart."""
    prices: Prices = field(default_factory=Prices)
    """They change no decision."""

    def __post_init__(self) -> None:
        self._check_prices()
        given = {"launch_s": self.launch_s, "control_s": self.control_s}
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
                f"{len(self.pools)}: nobody could tell which of their nodes are reserved"
            )
        if prices.reserved_nodes is not None and prices.on_demand is None:
            nodes = prices.reserved_nodes
            raise InvalidRequestError(
                f"{nodes} reserved node{'s' if nodes != 1 else ''} and no price of the others: say "
                "what nodes on demand cost (--price-on-demand), or all are reserved"
            )

    @property
    def gpus(self) -> int:
        """Training GPUs of the cluster."""
        return sum(pool.nodes * pool.node_type.gpus for pool in self.pools)


def _is_amount(value: float) -> bool:
    """At least 0, and a number that can be reckoned with: neither NaN nor endless."""
    return 0.0 <= value <= AMOUNT_MAX
