"""Gantt chart of groups and the jobs that hold them."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plexrl.sim.report.plots.figure import GROUND, THEME, Key, Picture, Plot, draw, plain
from plexrl.sim.report.plots.style import JOB_COLOURS, SWITCH_COLOUR
from plexrl.sim.report.units import duration, time_unit
from plexrl.sim.results.comparison import LabelledRun
from plexrl.sim.results.result import Span

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

GROUPS_MAX = 60
WIDTH = 13.0
ROW = 0.17
TALL = 20
"""Number of groups from which the time axis is repeated above the rows."""
PIXELS_FROM = 2500
"""Number of spans from which bars are rasterised; as outlines they would take megabytes."""


def gantt_plot(
    runs: Sequence[LabelledRun], window_s: tuple[float, float] | None = None
) -> Plot | None:
    """One picture per run; absent without spans. Without `window_s` all spans are shown."""
    shown = [run for run in runs if run.result.spans]
    if not shown:
        return None
    start, end = window_s or (
        min(span.start_s for run in shown for span in run.result.spans),
        max(span.end_s for run in shown for span in run.result.spans),
    )
    unit = time_unit(end - start)
    jobs = {span.job for run in shown for span in run.result.spans}
    return Plot(
        name="gantt",
        title="Who held which group",
        says=f"{duration(end - start)} of the trace from {duration(start)} after its start, in "
        f"{unit.name}. A row is a group, a colour within a row a job ({len(jobs):,} jobs in all, "
        "so colours come again from row to row), black are the switches between jobs, and on the "
        "bare ground the group is idle, or is not there. In charts of at most "
        f"{PIXELS_FROM:,} bars a bar's job is shown where the pointer rests.",
        pictures=tuple(
            _picture(f"gantt{index}", run, start, end) for index, run in enumerate(shown)
        ),
        keys=(
            Key(label="switch", colour=SWITCH_COLOUR),
            Key(label="idle, or no group", colour=THEME[GROUND]),
        ),
        wide=True,
    )


def _picture(name: str, run: LabelledRun, start_s: float, end_s: float) -> Picture:
    groups = natural({span.group for span in run.result.spans})
    kept = groups[:GROUPS_MAX]
    cut = "" if len(kept) == len(groups) else f", the first {len(kept)} of {len(groups)} groups"
    if run.result.spans_left_out:
        cut += f" (later on {run.result.spans_left_out:,} stretches are left out)"
    return Picture(
        title=f"{run.label}{cut}",
        svg=_bars(name, run, kept, start_s, end_s),
    )


def _bars(
    name: str, run: LabelledRun, groups: Sequence[str], start_s: float, end_s: float
) -> "Markup":
    rows = {group: place for place, group in enumerate(groups)}
    spans = [span for span in run.result.spans if span.group in rows]
    unit = time_unit(end_s - start_s)
    colours = job_colours(spans)
    held = _by_bar(spans)
    titles = {}

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.set_facecolor(GROUND)
        for index, ((group, job, switching), parts) in enumerate(held.items()):
            bars = axes.broken_barh(
                [
                    (
                        (span.start_s - start_s) / unit.seconds,
                        (span.end_s - span.start_s) / unit.seconds,
                    )
                    for span in parts
                ],
                (rows[group] - 0.42, 0.84),
                facecolors=SWITCH_COLOUR if switching else colours[group, job],
                linewidth=0,
                rasterized=len(spans) > PIXELS_FROM,
            )
            bars.set_gid(f"bar{index}")
            titles[f"bar{index}"] = f"{group}: {'switch to or from ' if switching else ''}{job}"
        axes.set_yticks(range(len(groups)), [plain(group, 20) for group in groups])
        axes.tick_params(axis="y", labelsize=7)
        axes.tick_params(axis="x", labeltop=len(groups) > TALL)
        axes.set(ylim=(len(groups) - 0.4, -0.6), xlabel=f"{unit.name} of the window")
        axes.set_xlim(0, (end_s - start_s) / unit.seconds)
        axes.grid(visible=False)

    height = 0.6 + ROW * max(len(groups), 3)
    return draw(name, (WIDTH, height), paint, describes=f"Gantt chart, {run.label}", titles=titles)


def job_colours(spans: Sequence[Span]) -> dict[tuple[str, str], str]:
    """Colour by (group, job), in order of appearance, so that neighbours in a row differ."""
    colours: dict[tuple[str, str], str] = {}
    counts: dict[str, int] = {}
    for span in spans:
        if (span.group, span.job) not in colours:
            place = counts.setdefault(span.group, 0)
            colours[span.group, span.job] = JOB_COLOURS[place % len(JOB_COLOURS)]
            counts[span.group] += 1
    return colours


def natural(names: set[str]) -> list[str]:
    """Names in natural order: `g2` before `g10`."""
    return sorted(
        names,
        key=lambda name: (
            [
                (0, int(part), "") if part.isdecimal() else (1, 0, part)
                for part in re.split(r"(\d+)", name)
            ],
            name,
        ),
    )


def _by_bar(spans: Sequence[Span]) -> Mapping[tuple[str, str, bool], list[Span]]:
    held: dict[tuple[str, str, bool], list[Span]] = {}
    for span in spans:
        held.setdefault((span.group, span.job, span.kind != "run"), []).append(span)
    return held
