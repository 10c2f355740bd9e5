"""The simulated cluster, batch, workload and system."""

from dataclasses import dataclass, field
from enum import StrEnum

from plexrl.client.data.rollout_policy import OVER_LAUNCH
from plexrl.errors import InvalidRequestError
from plexrl.latency.costs import EngineCosts
from plexrl.latency.models import Model
from plexrl.limits import check_numbers
from plexrl.rollout.policies.length_dispatch import LONG_PART
from plexrl.sim.rollout.engine.rewards import AT_ONCE, RewardCosts
from plexrl.sim.rollout.workload import RolloutWorkload


class SystemName(StrEnum):
    """A way to overlap rollout and training."""

    SYNC = "sync"
    """Rollout on all GPUs, then training on all GPUs, as verl."""
    STALEFLOW = "staleflow"
    """PlexRL's coordinator, as StaleFlow."""
    TAIL = "tail"
    """PlexRL's coordinator with tail batching on all GPUs, then training on them (Flexes §3)."""
    FLEXES = "flexes"
    """As tail, with those of the other parts of Flexes that are on (`Parts`)."""
    STREAMRL_SKEW = "streamrl-skew"
    """PlexRL's coordinator with `length_aware` on all GPUs, then training on them (StreamRL §5)."""
    STREAMRL_SYNC = "streamrl-sync"
    """The same with GPUs of their own for rollout and training. Prompts are trained as they are
    complete, while others of their batch are generated (StreamRL §4.1)."""
    STREAMRL_ASYNC = "streamrl-async"
    """The same one step ahead."""

    PAT = "pat"
    """As sync, with tensor-parallel groups whose size changes while a batch drains (PAT)."""


STREAMED = (SystemName.STREAMRL_SYNC, SystemName.STREAMRL_ASYNC)
"""Systems with stream generation."""
RANKED = (SystemName.STREAMRL_SKEW, *STREAMED)
"""Systems with expected lengths."""
SPLIT = (SystemName.STALEFLOW, *STREAMED)
"""Systems with separate GPUs for rollout and training."""
COORDINATED = (SystemName.TAIL, SystemName.FLEXES)
"""On-policy systems of the coordinator. Every prompt of the run is trained by its end."""
ON_POLICY = (SystemName.SYNC, *COORDINATED, SystemName.STREAMRL_SKEW, SystemName.PAT)
"""Systems without staleness, whose GPUs all roll out, and then all train."""
FIXED_STALENESS = {
    **dict.fromkeys(ON_POLICY, 0),
    SystemName.STREAMRL_SYNC: 0,
    SystemName.STREAMRL_ASYNC: 1,
}
RECALL = 0.71
"""Recall of PlexRL's ranker on prompts that it has not seen (`benchmarks/rollout_ranker.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Cluster, batch, workload and duration, equal for all systems."""

    gpus: int = 128
    batch_groups: int = 128
    """Prompts of one training batch."""
    workload: RolloutWorkload = field(default_factory=RolloutWorkload)
    costs: EngineCosts = field(default_factory=EngineCosts)
    model: Model | None = None
    """The model that `costs` are of, so that the size of tensor-parallel groups can change."""
    rewards: RewardCosts = AT_ONCE
    steps: int = 16
    """Training steps of a run."""
    warmup_steps: int = 6
    """Training steps at the start that the throughput leaves out, while pipelines fill."""
    cycle_s: float = 1.0
    """Seconds between two snapshots of the coordinator."""
    command_s: float = 0.05
    """Seconds from a decision to its effect."""

    def __post_init__(self) -> None:
        for name in ("gpus", "batch_groups", "steps"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}: give at least 1")
        if not 0 <= self.warmup_steps < self.steps:
            raise InvalidRequestError(
                f"{self.warmup_steps} warm-up steps of {self.steps}: give 0 to {self.steps - 1}"
            )
        if self.cycle_s <= 0 or self.command_s < 0:
            raise InvalidRequestError("cycle_s must be above 0 and command_s at least 0")
        longest = self.workload.prompt_tokens + self.workload.limit
        if longest + 1 > self.costs.kv_tokens:
            raise InvalidRequestError(
                f"a trajectory of {longest:,} tokens does not fit a KV cache of "
                f"{self.costs.kv_tokens:,}: lower the limit or raise kv_tokens"
            )
        if self.gpus < self.costs.gpus:
            raise InvalidRequestError(
                f"{self.gpus} GPUs are fewer than the {self.costs.gpus} of one instance"
            )

    @property
    def batch_trajectories(self) -> int:
        """Trajectories of one training batch."""
        return self.batch_groups * self.workload.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategies:
    """Which strategies are StaleFlow's; the others are their vanilla counterparts (§6.5)."""

    routing: bool = True
    synchronization: bool = True
    migration: bool = True

    @property
    def label(self) -> str:
        """`R`, `S` and `M` of those that are on; `vanilla` for none."""
        letters = zip("RSM", (self.routing, self.synchronization, self.migration), strict=True)
        return "".join(letter for letter, on in letters if on) or "vanilla"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Which parts of Flexes are on; those that are off are what `sync` does."""

    tail: bool = True
    """Tail batching (§3)."""
    rewards: bool = True
    """Rewards of complete responses while others are generated (§4.3)."""
    parallelism: bool = True
    """The parallelism planner (§4.2)."""
    stream: bool = True
    """The stream trainer (§4.4)."""

    def __post_init__(self) -> None:
        if self.stream and not self.rewards:
            raise InvalidRequestError(
                "the stream trainer trains prompts that have rewards: switch rewards on, too"
            )

    @property
    def label(self) -> str:
        """`T`, `R`, `P` and `S` of those that are on; `none` for none."""
        values = (self.tail, self.rewards, self.parallelism, self.stream)
        letters = zip("TRPS", values, strict=True)
        return "".join(letter for letter, on in letters if on) or "none"


TAIL_ONLY = Parts(rewards=False, parallelism=False, stream=False)
NO_PARTS = Parts(tail=False, rewards=False, parallelism=False, stream=False)


class Ends(StrEnum):
    """The lengths that `pat` expects of unfinished responses."""

    PROJECTED = "projected"
    """At earlier lengths, as a live rollout does (`policies.adaptive_tp.projection`)."""
    LIMIT = "limit"
    """At the limit (PAT Alg. 1)."""
    KNOWN = "known"
    """Where they end: an oracle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system and its own settings."""

    name: SystemName
    staleness: int = 0
    """η."""
    rollout_gpus: int = 0
    """GPUs of rollout instances; the others train. On-policy systems use all for both."""
    strategies: Strategies = field(default_factory=Strategies)
    parts: Parts = field(default_factory=Parts)
    """Active parts of `flexes`."""
    over_launch_prompts: float = OVER_LAUNCH
    """How many times the prompts of a batch a short round starts (Flexes §3)."""
    over_launch_responses: float = OVER_LAUNCH
    """The same for the responses to a prompt."""
    fixed_over_launch: bool = False
    """Every short round starts so much, as in Flexes; otherwise at most so much."""
    recall: float = RECALL
    """Part of the longest fifth of a batch's prompts that the ranks of `RANKED` systems find
    (StreamRL Tab. 4). 0.2: random ranks; 1: all lengths are known."""
    ends: Ends = Ends.PROJECTED
    """Where `pat` expects responses to end."""

    def __post_init__(self) -> None:
        if not LONG_PART <= self.recall <= 1.0:
            raise InvalidRequestError(f"recall is {self.recall}: give {LONG_PART:g} to 1")
        fixed = FIXED_STALENESS.get(self.name)
        if self.staleness < 0 or (fixed is not None and self.staleness != fixed):
            wanted = "at least 0" if fixed is None else str(fixed)
            raise InvalidRequestError(
                f"staleness of {self.name.value} is {self.staleness}: give {wanted}"
            )
        names = ("over_launch_prompts", "over_launch_responses")
        check_numbers("rollout", {name: getattr(self, name) for name in names})

    @property
    def active_parts(self) -> Parts:
        """The parts of Flexes that this system has."""
        if self.name == SystemName.FLEXES:
            return self.parts
        return TAIL_ONLY if self.name == SystemName.TAIL else NO_PARTS

    @property
    def label(self) -> str:
        """Name, η and strategies, as text."""
        parts = [self.name.value]
        if self.name == SystemName.STALEFLOW:
            parts.append(f"η={self.staleness}")
            if self.strategies != Strategies():
                parts.append(self.strategies.label)
        if self.name == SystemName.FLEXES and self.parts != Parts():
            parts.append(self.parts.label)
        if self.name in RANKED and self.recall != RECALL:
            parts.append(f"recall {self.recall:g}")
        if self.fixed_over_launch:
            parts.append("fixed")
        if self.ends != Ends.PROJECTED:
            parts.append(self.ends.value)
        return " ".join(parts)


def check_system(setting: Setting, system: System) -> None:
    """Check that the system can run in the setting; 0 rollout GPUs mean that the best split is
    searched for.

    Raises:
        InvalidRequestError: a split leaves rollout or training without GPUs; the system knows no
            rewards; the planner knows no model.
    """
    if system.name in COORDINATED and system.active_parts.parallelism and setting.model is None:
        raise InvalidRequestError(
            "the parallelism planner needs the latencies of several sizes: give a model, or switch "
            "it off"
        )
    if system.name == SystemName.PAT:
        if setting.model is None:
            raise InvalidRequestError("pat needs the latencies of several sizes: give a model")
        per_node = setting.model.gpu.per_node
        if setting.gpus > per_node and setting.gpus % per_node:
            raise InvalidRequestError(
                f"{setting.gpus} GPUs of pat: give up to {per_node}, or whole nodes"
            )
    if setting.rewards != AT_ONCE and system.name not in ON_POLICY:
        names = ", ".join(each.value for each in ON_POLICY)
        raise InvalidRequestError(
            f"{system.name.value} knows no rewards that take time: use {names}"
        )
    given = system.rollout_gpus
    if system.name in SPLIT and given and not setting.costs.gpus <= given < setting.gpus:
        raise InvalidRequestError(
            f"{given} rollout GPUs of {setting.gpus}: give {setting.costs.gpus} to "
            f"{setting.gpus - 1}, so that rollout and training have some each"
        )
