"""Formats numbers and durations for people. Pure."""

import math
from dataclasses import dataclass

ABSENT = "\N{EN DASH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUnit:
    """A time unit of an axis."""

    name: str
    letters: str
    """Abbreviation after a number."""
    seconds: float


UNITS = (
    TimeUnit(name="days", letters="days", seconds=86400.0),
    TimeUnit(name="hours", letters="h", seconds=3600.0),
    TimeUnit(name="minutes", letters="min", seconds=60.0),
)
SECONDS = TimeUnit(name="seconds", letters="s", seconds=1.0)


def time_unit(longest_s: float) -> TimeUnit:
    """The largest unit of which `longest_s` has at least two."""
    return next((unit for unit in UNITS if longest_s >= 2 * unit.seconds), SECONDS)


def duration(seconds: float | None) -> str:
    """A duration such as `4.2 days`, with about three digits; a dash if absent."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    unit = time_unit(abs(seconds))
    return f"{short(seconds / unit.seconds)} {unit.letters}"


def short(number: float | None) -> str:
    """A number with three digits, or all digits before the point: `0.123`, `12.3`, `1,234`."""
    if number is None or not math.isfinite(number):
        return ABSENT
    if number == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(number)))
    return f"{number:,.{min(max(digits, 0), 4)}f}"


def percent(part: float | None) -> str:
    """A percentage such as `12.3 %`."""
    if part is None or not math.isfinite(part):
        return ABSENT
    # Rounding and adding 0 avoids a negative zero.
    return f"{round(100 * part, 1) + 0.0:,.1f} %"
