"""Models the daily and weekly arrival rate by a clock that runs faster in busy hours. Pure.

Arrivals are a renewal process on this clock (time rescaling). The weights of the hours have mean 1,
so a clock second is a second on average.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

HOUR_S = 3600.0
DAY_HOURS, WEEK_HOURS = 24, 168
WEIGHT_MIN = 0.02
"""Smallest weight, so that an hour without observed arrivals is still possible."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Periodic weights of hours; with one weight all hours are equal."""

    weights: tuple[float, ...] = (1.0,)
    _ends: tuple[float, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        ends = (0.0, *accumulate(weight * HOUR_S for weight in self.weights))
        object.__setattr__(self, "_ends", ends)

    def clock(self, time_s: float) -> float:
        """The clock at a time."""
        rounds, rest = divmod(time_s, len(self.weights) * HOUR_S)
        hour = min(int(rest // HOUR_S), len(self.weights) - 1)
        return (
            rounds * self._ends[-1] + self._ends[hour] + self.weights[hour] * (rest - hour * HOUR_S)
        )

    def time(self, clock_s: float) -> float:
        """The time of a clock value."""
        rounds, rest = divmod(clock_s, self._ends[-1])
        hour = min(bisect_right(self._ends, rest) - 1, len(self.weights) - 1)
        inside = (rest - self._ends[hour]) / self.weights[hour]
        return (rounds * len(self.weights) + hour) * HOUR_S + inside


def rhythm_of(times_s: Iterable[float], span_s: float) -> Rhythm:
    """The rhythm of a trace: by hour of the week from three weeks on, by hour of the day from three
    days on, else constant."""
    if span_s < 3 * DAY_HOURS * HOUR_S:
        return Rhythm()
    hours = WEEK_HOURS if span_s >= 3 * WEEK_HOURS * HOUR_S else DAY_HOURS
    counts = [0.0] * hours
    for time_s in times_s:
        counts[int(time_s // HOUR_S) % hours] += 1.0
    # Each count is divided by how often the hour occurred, partial periods included.
    rounds, rest = divmod(span_s / HOUR_S, hours)
    rates = [
        count / (rounds + min(max(rest - hour, 0.0), 1.0)) for hour, count in enumerate(counts)
    ]
    mean = sum(rates) / hours
    if not mean:
        return Rhythm()
    floored = [max(WEIGHT_MIN, rate / mean) for rate in rates]
    scale = hours / sum(floored)
    return Rhythm(tuple(weight * scale for weight in floored))
