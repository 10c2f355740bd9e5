"""Plot of the use of the cluster's GPUs over time."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plexrl.sim.report.plots.figure import INK, Key, Picture, Plot, draw
from plexrl.sim.report.plots.style import Look
from plexrl.sim.report.units import TimeUnit, percent, time_unit
from plexrl.sim.results.comparison import LabelledRun

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

SIZE = (5.8, 2.1)
HELD_ALPHA = 0.35


def utilisation_plot(runs: Sequence[LabelledRun], looks: Mapping[str, Look]) -> Plot | None:
    """One panel per run, all on one scale; absent if no run has a series."""
    shown = [run for run in runs if run.result.utilisation]
    if not shown:
        return None
    longest = max(run.result.drain_s for run in shown)
    unit = time_unit(longest)
    return Plot(
        name="utilisation",
        title="The cluster's GPUs over time",
        says="Part of the cluster's GPUs that belong to some job's group (pale) and part that "
        f"works at that moment (full colour), over the {unit.name} since the trace's start. The "
        "stroke is the lower bound of the drain time. All panels have the same scales.",
        pictures=tuple(
            Picture(
                title=f"{run.label}: {percent(trained(run))} of all GPUs work on average",
                svg=_panel(f"utilisation{index}", run, looks[run.label], longest, unit),
            )
            for index, run in enumerate(shown)
        ),
        keys=(
            Key(label="in a group", colour="currentColor", pale=True),
            Key(label="working", colour="currentColor"),
            Key(label="lower bound of the drain time", colour="currentColor", dash=()),
        ),
    )


def trained(run: LabelledRun) -> float | None:
    """Part of the cluster's GPU-hours until the drain that operations use, moves excluded."""
    return part_of_cluster(run, run.result.busy_gpu_hours)


def part_of_cluster(run: LabelledRun, gpu_hours: float) -> float | None:
    """`gpu_hours` as a part of all GPU-hours until the drain; absent if these are 0."""
    hours = run.result.gpus * run.result.drain_s / 3600
    return gpu_hours / hours if hours > 0 else None


def _panel(name: str, run: LabelledRun, look: Look, longest_s: float, unit: TimeUnit) -> "Markup":
    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import PercentFormatter

        axes = figure.subplots()
        series = run.result.utilisation
        starts = [start / unit.seconds for start, _, _ in series]
        # The last bin ends at the drain time.
        starts.append(max(run.result.drain_s / unit.seconds, starts[-1]))
        for column, alpha in ((1, HELD_ALPHA), (2, 1.0)):
            parts = [row[column] for row in series]
            axes.fill_between(
                starts,
                [*parts, parts[-1]],
                step="post",
                color=look.colour,
                alpha=alpha,
                linewidth=0,
            )
        axes.axvline(run.result.bounds.bound_s / unit.seconds, color=INK, linewidth=1)
        axes.set(xlim=(0, longest_s / unit.seconds * 1.01 or 1.0), ylim=(0, 1.02))
        axes.set_xlabel(unit.name)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    return draw(name, SIZE, paint, describes=f"Utilisation over time, {run.label}")
