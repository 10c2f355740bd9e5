"""Seconds until the reward of a response is known. Pure.

All responses to a prompt take equally long. Most are graded in `usual_s`. A part of the prompts has
programs that run until the sandbox ends them, `slow_s` after their start. There are always enough
workers, and they take nothing from the GPUs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from plexrl.errors import InvalidRequestError
from plexrl.sim.workload.counter_rng import stream, uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCosts:
    """How long rewards take; by default no time."""

    usual_s: float = 0.0
    slow_s: float = 0.0
    slow_part: float = 0.0
    """Part of the prompts whose rewards take `slow_s`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise InvalidRequestError(f"{field.name} is {value}: give a number of at least 0")
        if self.slow_part > 1.0:
            raise InvalidRequestError(f"slow_part is {self.slow_part}: give a part of at most 1")


AT_ONCE = RewardCosts()
MIXED = RewardCosts(usual_s=2.0, slow_s=30.0, slow_part=0.05 / 3)
"""A third each of math, code and judged prompts. Rules for math have 2 s (Flexes §5). About 5 % of
the code prompts reach the sandbox's limit of 30 s (Flexes §4.3)."""


class Rewards:
    """The seconds of each prompt of a run."""

    def __init__(self, costs: RewardCosts, seed: int) -> None:
        self._costs = costs
        self._stream = stream(seed, "rollout rewards")

    def seconds(self, prompt: int) -> float:
        """Seconds from the end of a response to its reward."""
        is_slow = uniform(self._stream, prompt) < self._costs.slow_part
        return self._costs.slow_s if is_slow else self._costs.usual_s

    def stage_s(self, prompts: Iterable[int]) -> float:
        """Seconds of a stage in which the rewards of these prompts begin together."""
        return max((self.seconds(prompt) for prompt in prompts), default=0.0)
