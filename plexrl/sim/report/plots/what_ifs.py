"""Plot of what-ifs: changes of drain time and cost relative to the original runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plexrl.errors import InvalidRequestError
from plexrl.sim.report.plots.figure import INK, Key, Picture, Plot, draw, plain
from plexrl.sim.report.plots.style import Look
from plexrl.sim.report.units import duration, percent, short
from plexrl.sim.results.comparison import Run
from plexrl.sim.results.result import SimResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 5.8
BAR_INCHES = 0.26
HEADROOM = 0.62
"""Extra length of the axis, relative, for the figures next to the bars."""
LENGTH_MIN = 0.02
"""Smallest length of an axis, so that tiny changes look small."""
BARS_MAX = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The result of a changed run."""

    change: str
    of: int
    """Index of the original run in the report, from 0."""
    result: SimResult


def what_if_plot(
    runs: Sequence[Run], what_ifs: Sequence[WhatIf], looks: Mapping[str, Look]
) -> Plot | None:
    """One picture of drain times and one of costs, if not 0; absent without what-ifs.

    Raises:
        InvalidRequestError: a what-if refers to a run that does not exist.
    """
    if strange := [each.change for each in what_ifs if not 0 <= each.of < len(runs)]:
        raise InvalidRequestError(
            f"what if {strange[0]}: its original is not among the report's {len(runs)} runs"
        )
    shown = what_ifs[:BARS_MAX]
    if not shown:
        return None
    figures: list[tuple[str, str, Callable[[SimResult], float], Callable[[float], str]]] = [
        ("drain", "Time to drain", lambda result: result.drain_s, duration),
        ("cost", "Cost", lambda result: result.cost, short),
    ]
    pictures = tuple(
        _picture(f"what-if-{name}", title, runs, shown, looks, value, text)
        for name, title, value, text in figures
        if any(value(runs[each.of].result) > 0 for each in shown)
    )
    left_out = len(what_ifs) - len(shown)
    compared = dict.fromkeys(runs[each.of].label for each in shown)
    return Plot(
        name="whatifs",
        title="What if",
        says="By how much of what it was each run would differ, and what it would come to; to the "
        "left is shorter or cheaper."
        + (f" {left_out} more are in the list above." if left_out else ""),
        pictures=pictures,
        keys=tuple(Key(label=label, colour=looks[label].colour) for label in compared),
    )


def _picture(
    name: str,
    title: str,
    runs: Sequence[Run],
    shown: Sequence[WhatIf],
    looks: Mapping[str, Look],
    value: Callable[[SimResult], float],
    text: Callable[[float], str],
) -> Picture:
    parts = [_part(value(runs[each.of].result), value(each.result)) for each in shown]
    lowest, highest = min(0.0, *parts), max(0.0, *parts)
    length = max(LENGTH_MIN, highest - lowest)

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, (each, part) in enumerate(zip(shown, parts, strict=True)):
            axes.barh(place, 100 * part, height=0.7, color=looks[runs[each.of].label].colour)
            by = "=" if value(each.result) == value(runs[each.of].result) else _signed(part)
            label = f" {text(value(each.result))}  ({by})"
            axes.annotate(label, (100 * max(part, 0.0), place), va="center")
        axes.plot([0, 0], [-0.5, len(shown) - 0.5], color=INK, linewidth=1)
        first = [
            at for at, each in enumerate(shown) if not at or each.change != shown[at - 1].change
        ]
        axes.set_yticks(first, [plain(shown[at].change, 26) for at in first])
        for at in first[1:]:
            axes.plot(
                [0, 1],
                [at - 0.5, at - 0.5],
                color=INK,
                linewidth=0.4,
                transform=axes.get_yaxis_transform(),
            )
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set(
            xlim=(100 * (lowest - 0.04 * length), 100 * (highest + HEADROOM * length)),
            xlabel="change in %",
        )

    size = WIDTH, 0.8 + BAR_INCHES * len(shown)
    return Picture(svg=draw(name, size, paint, describes=f"{title}: changes as bars"), title=title)


def _part(was: float, now: float) -> float:
    return now / was - 1.0 if was else 0.0


def _signed(part: float) -> str:
    return ("+" if part > 0 else "") + percent(part)
