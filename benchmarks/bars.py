"""Compares figures with the bars in `bars.toml`.

A bar is a comparison with a number, such as `>= 0.9`. `aim` is a second one, which may be missed.
"""

import operator
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

BARS = Path(__file__).parent / "bars.toml"
HOLDS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What one figure has to reach."""

    figure: str
    bar: str
    aim: str = ""

    def verdict(self, value: float | None) -> str:
        """`met`, `met, aim missed`, `missed`, or `not measured`."""
        if value is None:
            return "not measured"
        if not _holds(self.bar, value):
            return "missed"
        return "met" if not self.aim or _holds(self.aim, value) else "met, aim missed"


def bars_of(benchmark: str) -> list[Bar]:
    """The bars of a benchmark, by its path under `benchmarks/`."""
    return bars().get(benchmark, [])


def bars() -> Mapping[str, list[Bar]]:
    """All bars, by benchmark.

    Raises:
        ValueError: a bar is no comparison with a number.
    """
    found = tomllib.loads(BARS.read_text())
    every = {
        name: [Bar(figure=figure, **each) for figure, each in figures.items()]
        for name, figures in found.items()
    }
    for each in (bar for some in every.values() for bar in some):
        for text in filter(None, (each.bar, each.aim)):
            _parsed(text)
    return every


def _holds(text: str, value: float) -> bool:
    sign, bound = _parsed(text)
    return HOLDS[sign](value, bound)


def _parsed(text: str) -> tuple[str, float]:
    sign, _, bound = text.partition(" ")
    if sign not in HOLDS:
        raise ValueError(f"{BARS.name}: {text!r} is no bar: write {' or '.join(HOLDS)}, a number")
    return sign, float(bound)
