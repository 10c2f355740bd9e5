"""Deterministic variation of cycles, for the contention prediction.

Uses the quantiles of a lognormal distribution, each equally often, in fixed shuffled orders. So a
prediction depends on the members only.
"""

import math
from statistics import NormalDist
from typing import Final

from plexrl.scheduler.state.demand.trace import DemandTrace

QUANTILES = 32
"""Number of quantiles; an order holds each of them equally often."""

STREAMS = 8
"""Independent orders. Further residents reuse them at other offsets."""

ORDER_CYCLES = 512
"""Cycles before an order repeats. The quantiles are balanced over the whole order only. Balancing
over shorter stretches would pull phases back, so they would drift less than real ones."""

SHARED_PART = 0.5
"""Correlation, inside a cycle, of the pauses and the bursts: a long rollout makes a large batch,
but its end also varies for other reasons."""


def spread_of(trace: DemandTrace) -> float:
    """Standard deviation of the logarithm of bursts and of pauses, such that whole cycles vary as
    the trace says."""
    busy_s, idle_s = trace.busy_s, trace.period_s - trace.busy_s
    square = busy_s * busy_s + idle_s * idle_s + 2.0 * SHARED_PART * busy_s * idle_s
    return trace.jitter_s / math.sqrt(square)


def factors_of(spread: float) -> list[float]:
    """Lognormal factors with mean 1, one for each quantile."""
    return [math.exp(spread * normal - spread * spread / 2.0) for normal in _NORMALS]


def _orders() -> list[tuple[int, ...]]:
    """Shuffled quantile indexes, two orders for each stream."""
    state = 1
    found = []
    for _ in range(2 * STREAMS):
        order = [index % QUANTILES for index in range(ORDER_CYCLES)]
        for last in range(ORDER_CYCLES - 1, 0, -1):
            # Knuth's 64-bit generator; the orders only have to be unrelated.
            state = (state * 6364136223846793005 + 1442695040888963407) & ((1 << 64) - 1)
            other = (state >> 33) % (last + 1)
            order[last], order[other] = order[other], order[last]
        found.append(tuple(order))
    return found


_NORMALS: Final = tuple(
    NormalDist().inv_cdf((index + 0.5) / QUANTILES) for index in range(QUANTILES)
)
ORDERS: Final = tuple(_orders())
"""Two for each stream."""
