"""Settings of the rollout coordinator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plexrl.errors import InvalidRequestError
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.policies.adaptive_tp.settings import AdaptiveTpSettings
from plexrl.rollout.policies.scale_down import ScaleDownSettings
from plexrl.rollout.staleness.manager import StalenessSettings

Routing = Literal["throughput", "length-aware", "count"]
Synchronisation = Literal["throughput", "greedy"]
Migration = Literal["throughput", "none"]


EQUAL_REWARDS = 1e-6
"""Rewards that differ by less, as a part of the largest (or of 1), differ by rounding: float32
keeps seven digits. An advantage scaled by such a spread would be noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """The staleness bound, the strategies and their thresholds."""

    staleness: StalenessSettings
    cost_model: CostModel
    """Coefficients until steps are measured, and of what they do not tell."""
    routing: Routing = "throughput"
    """`throughput`: StaleFlow Alg. 3. `length-aware`: the same, with instances of their own for
    samples that are expected to be long (StreamRL Alg. 2). `count`: to the instance with the fewest
    trajectories."""
    synchronisation: Synchronisation = "throughput"
    """`throughput`: StaleFlow Alg. 4. `greedy`: as soon as there is a newer version."""
    migration: Migration = "throughput"
    """`throughput`: StaleFlow Alg. 5. `none`: only a pull interrupts trajectories."""
    gain_part_min: float = 0.3
    """μ: least part of the gain on an idle instance for which an older version has precedence."""
    waiting_max: int = 3
    """φ_wait: trajectories that may wait in an engine's own queue."""
    throughput_ratio_max: float = 5.0
    """φ_throughput: ratio of the instances' throughputs beyond which work is redistributed."""
    migration_gain_min: float = 0.05
    """Least gain of a redistribution, as part of the throughput of the instance whose work is
    returned. Without it, an idle instance would make the busiest one return its work in every
    cycle."""
    length_step_tokens: int = 256
    """Lengths are rounded down to multiples of this when gains are compared, so that trajectories
    of similar lengths share the work; 1 compares exact gains."""
    failures_max: int = 3
    """Failed generations of a trajectory after which its group is dropped."""
    dynamic_sampling: bool = False
    """A group whose rewards are all equal is dropped, and another prompt is trained in its place
    (DAPO's dynamic sampling)."""
    scale_down: ScaleDownSettings | None = None
    """Half of the instances are freed before a round is complete (Flexes Alg. 1); None: never."""
    adaptive_tp: AdaptiveTpSettings | None = None
    """The tensor-parallel groups of the engines change while rows end (PAT §4); None: never."""
    fixed_over_launch: bool = True
    """Every short round starts `extra_groups` and `extra_samples` more than is trained (Flexes §3).
    False: as many of them as makes batches soonest (`policies.tail_batching.over_launch`)."""
    measured_steps_max: int = 512
    """Latest measured steps to which the cost model is fitted."""

    def __post_init__(self) -> None:
        if self.dynamic_sampling and self.staleness.group_size < 2:
            raise InvalidRequestError(
                "dynamic_sampling with one sample of a prompt would drop every prompt, since its "
                "rewards are all equal: use 2 samples or more"
            )
        if self.scale_down is not None and self.staleness.staleness:
            raise InvalidRequestError(
                f"instances are freed at the end of a round, and with a staleness of "
                f"{self.staleness.staleness} there are no rounds: set one of them to none"
            )
        if self.adaptive_tp is not None and self.staleness.staleness:
            raise InvalidRequestError(
                f"tensor-parallel groups change while the last samples of a batch end, and with a "
                f"staleness of {self.staleness.staleness} others follow them: set staleness to 0, "
                "or leave adaptive_tp out"
            )
        for name, allowed in (
            ("routing", ("throughput", "length-aware", "count")),
            ("synchronisation", ("throughput", "greedy")),
            ("migration", ("throughput", "none")),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise InvalidRequestError(f"{name} is {value!r}: choose one of {allowed}")
        for name, low, high in (
            ("gain_part_min", 1e-9, 1.0),
            ("waiting_max", 0, 1 << 20),
            ("throughput_ratio_max", 1.0, 1e9),
            ("migration_gain_min", 0.0, 1e9),
            ("length_step_tokens", 1, 1 << 30),
            ("failures_max", 1, 1 << 20),
            ("measured_steps_max", 16, 1 << 20),
        ):
            if not low <= (value := getattr(self, name)) <= high:
                raise InvalidRequestError(f"{name} is {value}: set it from {low} to {high}")


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a prompt's samples are equal but for rounding."""
    scale = max(1.0, *map(abs, rewards))
    return max(rewards) - min(rewards) <= EQUAL_REWARDS * scale
