"""Plots of cumulative distributions over a run's jobs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from plexrl.sim.report.plots.figure import Key, Picture, Plot, draw
from plexrl.sim.report.plots.style import Look
from plexrl.sim.results.comparison import LabelledRun
from plexrl.sim.results.result import DistributionSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (5.8, 3.5)
LEAST_WAIT = 1e-3
"""Smaller waits, relative to the duration, count as 0 and are drawn at the left edge."""


def wait_plot(runs: Sequence[LabelledRun], looks: Mapping[str, Look]) -> Plot | None:
    """PlexRL Fig. 8, left; absent if no job waited."""
    shown = [run for run in runs if run.result.normalized_wait.cdf]
    if not any(run.result.normalized_wait.highest > LEAST_WAIT for run in shown):
        return None
    return Plot(
        name="wait",
        title="Waiting of jobs",
        says="Part of the jobs (up) whose wait from submission to first placement was at most so "
        "many times their own duration alone (right, logarithmic, to the largest 99th "
        f"percentile). The left edge holds the jobs that waited at most {LEAST_WAIT:g} of it; a "
        "curve further left and up is better.",
        pictures=(
            _curves(
                "wait",
                shown,
                looks,
                lambda run: run.result.normalized_wait,
                least=LEAST_WAIT,
                label="wait / duration alone",
            ),
        ),
        keys=line_keys([run.label for run in shown], looks),
    )


def completion_plot(runs: Sequence[LabelledRun], looks: Mapping[str, Look]) -> Plot | None:
    """Completion times of jobs; absent without jobs."""
    shown = [run for run in runs if run.result.completion.cdf]
    if not shown:
        return None
    return Plot(
        name="completion",
        title="Completion of jobs",
        says="Part of the jobs (up) that took from submission to end at most so many times their "
        "duration on GPUs of their own (right, logarithmic, to the largest 99th percentile; 1 is "
        "neither wait nor slowdown).",
        pictures=(
            _curves(
                "completion",
                shown,
                looks,
                lambda run: run.result.completion,
                least=1.0,
                label="(end - submission) / duration alone",
            ),
        ),
        keys=line_keys([run.label for run in shown], looks),
    )


def line_keys(labels: Iterable[str], looks: Mapping[str, Look]) -> tuple[Key, ...]:
    """The legend entries of the lines with these labels."""
    return tuple(
        Key(label=label, colour=looks[label].colour, dash=looks[label].dash) for label in labels
    )


def _curves(
    name: str,
    runs: Sequence[LabelledRun],
    looks: Mapping[str, Look],
    of: Callable[[LabelledRun], DistributionSummary],
    *,
    least: float,
    label: str,
) -> Picture:
    highest = max(max(of(run).p99 for run in runs), 2 * least)

    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

        axes = figure.subplots()
        for run in runs:
            values, parts = _from_left_edge(of(run).cdf, least, highest)
            axes.plot(values, parts, **looks[run.label].line, drawstyle="steps-post")
        axes.set_xscale("log")
        axes.set(xlim=(least, highest), ylim=(0, 1.015), xlabel=label, ylabel="jobs")
        if highest < 300 * least:
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.tick_params(axis="x", pad=7)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.xaxis.set_major_formatter(lambda value, _: _tick(value, least))
        axes.xaxis.set_minor_formatter(NullFormatter())

    return Picture(svg=draw(name, SIZE, paint, describes=f"Cumulative distribution of {label}"))


def _from_left_edge(
    cdf: Sequence[tuple[float, float]], least: float, highest: float
) -> tuple[list[float], list[float]]:
    """The curve from `least`, with all smaller values counted there, to beyond the right edge."""
    below = max((part for value, part in cdf if value <= least), default=0.0)
    above = [(value, part) for value, part in cdf if value > least]
    points = [(least, below), *above, (max(highest, cdf[-1][0]), cdf[-1][1])]
    return [value for value, _ in points], [part for _, part in points]


def _tick(value: float, least: float) -> str:
    text = f"{value:,.0f}" if value >= 1 else f"{value:g}"
    return f"≤ {text}" if value <= least and least < 1 else text
