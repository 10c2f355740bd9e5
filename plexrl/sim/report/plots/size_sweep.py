"""Plots of a sweep over cluster sizes."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from plexrl.sim.report.plots.cumulative import line_keys
from plexrl.sim.report.plots.figure import Picture, Plot, draw
from plexrl.sim.report.plots.style import Look
from plexrl.sim.report.units import time_unit
from plexrl.sim.results.comparison import LabelledRun, sizes
from plexrl.sim.results.result import SimResult

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

SIZE = (5.8, 3.3)


def sweep_plot(
    runs: Sequence[LabelledRun], looks: Mapping[str, Look], gpus_per_node: int | None
) -> Plot | None:
    """Figures over cluster size; absent unless some run name has two sizes or more."""
    lines = by_label(runs)
    if all(len(line) < 2 for line in lines.values()):
        return None
    across = "GPUs" if gpus_per_node is None else "nodes"
    drain = time_unit(max(run.result.drain_s for run in runs))
    wait = time_unit(max(run.result.wait.p95 for run in runs))
    panels: tuple[tuple[str, str, Callable[[SimResult], float]], ...] = (
        ("Drain time", drain.name, lambda result: result.drain_s / drain.seconds),
        ("Wait of jobs, p95", wait.name, lambda result: result.wait.p95 / wait.seconds),
        ("Cost", "currency of the price", lambda result: result.cost),
        (
            "Slowdown of cycles, mean",
            "percent",
            lambda result: 100 * result.cycle_slowdown.mean,
        ),
    )
    return Plot(
        name="sweep",
        title="Size of the cluster",
        says=f"Drain time ({drain.name}), 95th percentile of the jobs' wait for their first "
        f"placement ({wait.name}), cost, and mean slowdown of cycles, over the {across} of the "
        "cluster; lower is better. Where lines coincide the last named is on top.",
        pictures=tuple(
            Picture(
                title=title,
                svg=_panel(f"sweep{index}", title, unit, of, lines, looks, gpus_per_node),
            )
            for index, (title, unit, of) in enumerate(panels)
        ),
        keys=line_keys(lines, looks),
    )


def by_label(runs: Sequence[LabelledRun]) -> dict[str, list[LabelledRun]]:
    """Runs by name, ascending by size."""
    return {
        label: sorted((run for run in runs if run.label == label), key=lambda run: run.result.gpus)
        for label in dict.fromkeys(run.label for run in runs)
    }


def _panel(
    name: str,
    title: str,
    unit: str,
    of: Callable[[SimResult], float],
    lines: Mapping[str, Sequence[LabelledRun]],
    looks: Mapping[str, Look],
    gpus_per_node: int | None,
) -> "Markup":
    per = gpus_per_node or 1

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for label, line in lines.items():
            axes.plot(
                [run.result.gpus / per for run in line],
                [of(run.result) for run in line],
                **looks[label].line,
                marker=looks[label].marker,
                markersize=5,
                # Markers on the axis are not clipped.
                clip_on=False,
                zorder=3,
            )
        ticks = [size / per for size in sizes([run for line in lines.values() for run in line])]
        if len(ticks) <= 12:
            axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.set_xlabel("GPUs" if gpus_per_node is None else "nodes")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", pad=7)

    return draw(name, SIZE, paint, describes=f"{title} over the size of the cluster")
