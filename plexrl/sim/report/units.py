"""Numbers as people read them. Pure."""

import math
from dataclasses import dataclass

ABSENT = "\N{EN DASH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUnit:
    """A unit that an axis is drawn in."""

    name: str
    letters: str
    """Behind a number."""
    seconds: float


UNITS = (
    TimeUnit(name="days", letters="days", seconds=86400.0),
    TimeUnit(name="hours", letters="h", seconds=3600.0),
    TimeUnit(name="minutes", letters="min", seconds=60.0),
)
SECONDS = TimeUnit(name="seconds", letters="s", seconds=1.0)


def time_unit(longest_s: float) -> TimeUnit:
    """The largest of which `longest_s` has at least two."""
    return next((unit for unit in UNITS if longest_s >= 2 * unit.seconds), SECONDS)


def duration(seconds: float | None) -> str:
    """As `4.2 days`, three digits or so; a dash for what is absent."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    unit = time_unit(abs(seconds))
    return f"{short(seconds / unit.seconds)} {unit.letters}"


def short(number: float | None) -> str:
    """Three digits, or all before the point: `0.123`, `12.3`, `1,234`."""
    if number is None or not math.isfinite(number):
        return ABSENT
    if number == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(number)))
    return f"{number:,.{min(max(digits, 0), 4)}f}"


def percent(part: float | None) -> str:
    """As `12.3 %`."""
    if part is None or not math.isfinite(part):
        return ABSENT
    # Rounding first and adding 0 leaves no minus before a zero.
    return f"{round(100 * part, 1) + 0.0:,.1f} %"
