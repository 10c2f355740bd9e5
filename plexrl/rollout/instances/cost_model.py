"""Throughput of an instance by its load (StaleFlow §5.3 and App. B).

A decode step of `n` trajectories with `kv` of KV cache takes `k1 kv + max(k2, k3 n) + k4` seconds
and yields `n` tokens. `k5` is the KV cache of one token.

An instance without work takes also a trajectory that is longer than its KV cache: the engine
refuses it, which is reported and dropped in the end. Otherwise it would wait for ever, and all
behind it.

The paper's gain is that of the next step. While reading the weights takes most of a step, that is
larger where there is less KV cache, however many trajectories there are. So new ones would gather
where others are short, and all of them grow. Here a gain is that of a step at which all have grown.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plexrl.errors import InvalidRequestError
from plexrl.rollout.instances.snapshot import InstanceLoad

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients of one model on one kind of instance."""

    k1: float
    """Seconds per unit of KV cache: reading it."""
    k2: float
    """Seconds of reading the weights, the least time of the matrix products."""
    k3: float
    """Seconds of the matrix products per running trajectory."""
    k4: float
    """Seconds of everything else, such as launching kernels."""
    k5: float
    """KV cache of one token: in bytes, or 1 where KV cache is counted in tokens."""
    growth_tokens: float = 0.0
    """Tokens by which each trajectory has grown when gains are compared."""

    def __post_init__(self) -> None:
        for name in ("k1", "k2", "k3", "k4", "k5", "growth_tokens"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InvalidRequestError(f"{name} is {value}: it must be finite and not negative")
        if self.k2 + self.k3 + self.k4 <= 0:
            raise InvalidRequestError("k2, k3 and k4 are 0: a step must take some time")
        if self.k5 <= 0:
            raise InvalidRequestError("k5 is 0: a token takes some KV cache")

    def step_s(self, kv_cache: float, running: int) -> float:
        """Seconds of one decode step."""
        return self.k1 * kv_cache + max(self.k2, self.k3 * running) + self.k4

    def throughput(self, kv_cache: float, running: int) -> float:
        """Tokens per second (Eq. 2)."""
        return running / self.step_s(kv_cache, running)

    def fits(self, load: InstanceLoad, length: int) -> bool:
        """True if a trajectory of this length would run at once (Eq. 3)."""
        kv = load.kv_cache + self.k5 * length
        return not load.waiting and (kv <= load.kv_budget or not load.running)

    def gain(self, load: InstanceLoad, length: int) -> float:
        """Tokens per second gained by routing a trajectory of `length` tokens to the instance
        (Eq. 3), which may be negative; -inf if it would wait there."""
        kv = load.kv_cache + self.k5 * length
        n = load.running
        if load.waiting or (n and kv > load.kv_budget):
            return -math.inf
        k2, k3, k4, growth = self.k2, self.k3, self.k4, self.k5 * self.growth_tokens
        work = k3 * (n + 1)
        grown = kv + growth * (n + 1)
        after = (n + 1) / (self.k1 * grown + (work if work > k2 else k2) + k4)
        if not n:
            return after
        work = k3 * n
        grown = load.kv_cache + growth * n
        return after - n / (self.k1 * grown + (work if work > k2 else k2) + k4)

    def gains(self, kv_cache: Floats, running: Floats, kv_budget: Floats, length: int) -> Floats:
        """`gain` on many instances at once, [instance] each, whose own queues are empty."""
        kv = kv_cache + self.k5 * length
        more = running + 1
        growth = self.k5 * self.growth_tokens
        after = more / self._steps_s(kv + growth * more, more)
        before = running / self._steps_s(kv_cache + growth * running, running)
        fits = (kv <= kv_budget) | (running == 0)
        gained: Floats = np.where(fits, after - before, -np.inf)
        return gained

    def ideal_gain(self, length: int) -> float:
        """The gain on an idle instance, an upper bound (Eq. 4)."""
        return 1 / self.step_s(self.k5 * (length + self.growth_tokens), 1)

    def _steps_s(self, kv_cache: Floats, running: Floats) -> Floats:
        """`step_s` of many instances."""
        seconds: Floats = self.k1 * kv_cache + np.maximum(self.k3 * running, self.k2) + self.k4
        return seconds


QWEN3_30B_A3B_ON_H20 = CostModel(k1=7.28e-8, k2=1.72e-3, k3=1.25e-4, k4=1.07e-2, k5=1.0)
"""StaleFlow Table 4. It gives no unit of the KV cache and no `k5`: of the usual units, only tokens
make the times plausible (7.28e-8 s for the 98 304 bytes of a token are 1.35 TB/s)."""
