"""How the cycles of predicted members vary, without a draw of chance.

By quantiles of a lognormal law, each as often as the others, in fixed shuffled orders: a prediction
is a function of its members alone.
"""

import math
from statistics import NormalDist
from typing import Final

from plexrl.scheduler.state.demand import DemandTrace

QUANTILES = 32
"""Of a cycle's variation, each as often as the others in an order of draws."""

STREAMS = 8
"""Orders of draws; more residents than that share them, some cycles apart."""

ORDER_CYCLES = 512
"""Before an order repeats. What varies is balanced over the whole of it only: were it over shorter
stretches, the residents' phases would be brought back to where they were again and again, and
wander less through each other than they do."""

SHARED_PART = 0.5
"""Correlation, inside a cycle, of the time between bursts and the time in them: a long rollout
makes a large batch, but not only its length makes it late."""


def spread_of(trace: DemandTrace) -> float:
    """Of the logarithm of a cycle's parts: the same for bursts and pauses, and such that together
    they vary as the trace's cycles do."""
    busy_s, idle_s = trace.busy_s, trace.period_s - trace.busy_s
    square = busy_s * busy_s + idle_s * idle_s + 2.0 * SHARED_PART * busy_s * idle_s
    return trace.jitter_s / math.sqrt(square)


def factors_of(spread: float) -> list[float]:
    """Of mean 1, one a quantile."""
    return [math.exp(spread * normal - spread * spread / 2.0) for normal in _NORMALS]


def _orders() -> list[tuple[int, ...]]:
    """Shuffled numbers of quantiles, two orders a stream."""
    state = 1
    found = []
    for _ in range(2 * STREAMS):
        order = [index % QUANTILES for index in range(ORDER_CYCLES)]
        for last in range(ORDER_CYCLES - 1, 0, -1):
            # Knuth's 64-bit generator: nothing hangs on its quality but unrelated orders.
            state = (state * 6364136223846793005 + 1442695040888963407) & ((1 << 64) - 1)
            other = (state >> 33) % (last + 1)
            order[last], order[other] = order[other], order[last]
        found.append(tuple(order))
    return found


_NORMALS: Final = tuple(
    NormalDist().inv_cdf((index + 0.5) / QUANTILES) for index in range(QUANTILES)
)
ORDERS: Final = tuple(_orders())
"""Two a stream."""
