"""Bar plots of drain time and cost."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plexrl.sim.report.plots.figure import INK, Key, Picture, Plot, draw, plain
from plexrl.sim.report.plots.style import Look
from plexrl.sim.report.units import percent, short, time_unit
from plexrl.sim.results.comparison import LabelledRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.8
HEADROOM = 1.26
"""Width of the axis relative to the longest bar, for the figures next to the bars."""
ROLLOUT_ALPHA = 0.4
LABEL_LENGTH = 30
"""Most characters of a label: a policy and a swept setting."""


def drain_plot(runs: Sequence[LabelledRun], looks: Mapping[str, Look]) -> Plot | None:
    """Drain times and the lower bound; absent for a single run."""
    if len(runs) < 2:
        return None
    unit = time_unit(max(run.result.drain_s for run in runs))
    whose = " or ".join(sorted({run.baseline for run in runs if run.baseline})) or "the baseline"

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, run in enumerate(runs):
            value = run.result.drain_s / unit.seconds
            axes.barh(place, value, height=0.62, color=looks[run.label].colour)
            bound = run.result.bounds.bound_s / unit.seconds
            axes.plot([bound, bound], [place - 0.45, place + 0.45], color=INK, linewidth=2)
            ratio = "" if run.ratio is None else f"  ({percent(run.ratio)})"
            axes.annotate(f" {short(value)}{ratio}", (max(value, bound), place), va="center")
        _name_bars(axes, runs)
        longest = max(max(run.result.drain_s, run.result.bounds.bound_s) for run in runs)
        axes.set(xlim=(0, HEADROOM * longest / unit.seconds or 1.0), xlabel=unit.name)

    return Plot(
        name="drain",
        title="Time to drain the trace",
        says=f"From the trace's start to the end of its last job, in {unit.name}, and as part of "
        f"that of {whose} in brackets: the time of the cluster's GPUs. The stroke is the "
        "lower bound, which no scheduler can beat; shorter is better.",
        pictures=(Picture(svg=draw("drain", _size(runs), paint, describes="Drain times as bars")),),
        keys=(Key(label="lower bound", colour="currentColor", dash=()),),
    )


def cost_plot(runs: Sequence[LabelledRun], looks: Mapping[str, Look]) -> Plot | None:
    """Cost of training nodes and rollouts; absent for a single run or if all costs are 0."""
    if len(runs) < 2 or not any(run.result.cost > 0 for run in runs):
        return None

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, run in enumerate(runs):
            cost, rollout = run.result.cost, run.result.rollout_cost
            colour = looks[run.label].colour
            axes.barh(place, cost - rollout, height=0.62, color=colour)
            axes.barh(
                place, rollout, left=cost - rollout, height=0.62, color=colour, alpha=ROLLOUT_ALPHA
            )
            axes.annotate(f" {short(cost)}", (cost, place), va="center")
        _name_bars(axes, runs)
        axes.set(xlim=(0, HEADROOM * max(run.result.cost for run in runs)), xlabel="cost")
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")

    return Plot(
        name="cost",
        title="Cost",
        says="The training nodes as they are paid (full colour; all of them until the trace is "
        "drained, unless the bill says otherwise) and the rollout GPUs while their jobs ran "
        "(pale), in the currency of the prices; shorter is better.",
        pictures=(Picture(svg=draw("cost", _size(runs), paint, describes="Costs as bars")),),
        keys=(
            Key(label="training nodes", colour="currentColor"),
            Key(label="rollouts", colour="currentColor", pale=True),
        ),
    )


def _size(runs: Sequence[LabelledRun]) -> tuple[float, float]:
    return WIDTH, 0.75 + 0.34 * len(runs)


def _name_bars(axes: "Axes", runs: Sequence[LabelledRun]) -> None:
    axes.set_yticks(range(len(runs)), [plain(run.label, LABEL_LENGTH) for run in runs])
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
