"""Plots of the search for the smallest cluster: objectives and cost over nodes."""

from collections.abc import Callable, Mapping, Sequence
from math import floor, isfinite, log10
from typing import TYPE_CHECKING

from plexrl.sim.report.capacity import answer, is_percentage, meets_all, shown_objectives
from plexrl.sim.report.plots.cumulative import line_keys
from plexrl.sim.report.plots.figure import INK, PAPER, Key, Picture, Plot, draw
from plexrl.sim.report.plots.style import Look
from plexrl.sim.report.units import short, time_unit
from plexrl.sim.results.result import SimResult
from plexrl.sim.search.capacity_search import CapacityPlan
from plexrl.sim.search.objectives import Objective

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (5.8, 3.3)
FAR = 8.0
"""If figures exceed this multiple of the bound, the axis is logarithmic above the bound."""
HEADROOM = 1.12
"""Height of the axis relative to the highest figure."""
WIDE = 4.0
"""If sizes exceed this multiple of the smallest, the node axis is logarithmic."""
TICKS_MAX = 8
LARGE, SMALL = 13.0, 6.0
"""Marker sizes in points: the ring around an answer, and a probe."""

Judged = Callable[[CapacityPlan, int], bool]


def objective_plot(plans: Sequence[CapacityPlan], looks: Mapping[str, Look]) -> Plot:
    """One picture per objective: probes as points, the bound as a line."""
    wanted = shown_objectives(plans)
    return Plot(
        name="objectives",
        title="Nodes against objectives",
        says="Each point is a run on so many nodes. A filled point keeps this objective, a hollow "
        "one does not; the dotted line is the bound, and the shaded side keeps it. A ring marks "
        "the fewest nodes that keep all objectives. Where figures lie far above the bound, the "
        "axis is logarithmic beyond it; where points coincide, the last named policy is on top.",
        pictures=tuple(
            Picture(title=each.text, svg=_objective(f"objective{index}", each, plans, looks))
            for index, each in enumerate(wanted)
        ),
        keys=(
            *line_keys([plan.policy for plan in plans], looks),
            Key(label="bound", colour="currentColor", dash=(1.5, 2.0)),
        ),
    )


def cost_curve(plans: Sequence[CapacityPlan], looks: Mapping[str, Look]) -> Plot | None:
    """Cost over nodes; absent if all costs are 0."""
    if not any(result.cost > 0 for plan in plans for result in plan.results.values()):
        return None

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        largest = max(max(plan.results) for plan in plans)
        # Policies with the same answer share a region and a label.
        needs = {plan.nodes: plan for plan in reversed(plans) if plan.nodes is not None}
        for nodes, plan in needs.items():
            axes.axvspan(nodes, largest, color=looks[plan.policy].colour, alpha=0.1, linewidth=0)
        _probes(axes, plans, looks, lambda result: result.cost, meets_all)
        for nodes, plan in needs.items():
            cost = answer(plan).cost
            axes.annotate(
                f"{nodes:,}: {short(cost)}",
                (nodes, cost),
                xytext=(8, -8),
                textcoords="offset points",
                va="top",
            )
        axes.set_ylim(
            0, HEADROOM * max(result.cost for plan in plans for result in plan.results.values())
        )
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.set_ylabel("cost")

    return Plot(
        name="costcurve",
        title="Cost over nodes",
        says="What each run costs, training and rollout GPUs together, in the currency of the "
        "prices. A filled point keeps all objectives, a hollow one does not. The shaded region of "
        "a policy begins at its fewest nodes, which a ring marks with their number and cost.",
        pictures=(Picture(svg=draw("costcurve", SIZE, paint, describes="Cost over nodes")),),
        keys=line_keys([plan.policy for plan in plans], looks),
    )


def _objective(
    name: str, objective: Objective, plans: Sequence[CapacityPlan], looks: Mapping[str, Look]
) -> "Markup":
    values = [objective.value(result) for plan in plans for result in plan.results.values()]
    numbers = [objective.bound, *(value for value in values if isfinite(value))]
    is_far = 0 < FAR * objective.bound < max(numbers)
    scale, unit = _scale(objective, objective.bound if is_far else max(numbers))
    bound, lowest, highest = (
        each / scale for each in (objective.bound, min(numbers), max(numbers))
    )

    def kept(plan: CapacityPlan, size: int) -> bool:
        return objective.is_met(plan.results[size])

    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import NullLocator

        axes = figure.subplots()
        _probes(axes, plans, looks, lambda result: objective.value(result) / scale, kept)
        low, high = min(0.0, lowest), HEADROOM * highest or 1.0
        if is_far:
            axes.set_yscale("symlog", linthresh=bound)
            axes.set_yticks([0, bound, *_ticks_above(bound, highest)])
            axes.yaxis.set_minor_locator(NullLocator())
        kept_side = (low, bound) if objective.at_most else (bound, high)
        axes.axhspan(*kept_side, color=INK, alpha=0.05, linewidth=0)
        axes.axhline(bound, color=INK, linewidth=1.4, dashes=(1.5, 2.0))
        axes.set_ylim(low, high)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axes.set_ylabel(unit)

    return draw(name, SIZE, paint, describes=f"{objective.metric} over nodes")


def _ticks_above(bound: float, highest: float) -> list[float]:
    """Round numbers above the bound, spaced so that their labels do not overlap."""
    decades = range(floor(log10(bound)), floor(log10(highest)) + 1)
    steps = (1,) if len(decades) > 3 else (1, 2, 5)
    ticks = [step * 10.0**power for power in decades for step in steps]
    return [tick for tick in ticks if 1.6 * bound < tick <= highest]


def _probes(
    axes: "Axes",
    plans: Sequence[CapacityPlan],
    looks: Mapping[str, Look],
    value: Callable[[SimResult], float],
    kept: Judged,
) -> None:
    for plan in plans:
        look = looks[plan.policy]
        sizes = list(plan.results)
        values = [value(plan.results[size]) for size in sizes]
        axes.plot(sizes, values, **look.line, linewidth=1)
        for size, each in zip(sizes, values, strict=True):
            axes.plot(
                [size],
                [each],
                marker=look.marker,
                markersize=SMALL,
                color=look.colour,
                markerfacecolor=look.colour if kept(plan, size) else PAPER,
                linestyle="none",
                clip_on=False,
                zorder=3,
            )
        if plan.nodes is not None:
            axes.plot(
                [plan.nodes],
                [value(plan.results[plan.nodes])],
                marker="o",
                markersize=LARGE,
                markerfacecolor="none",
                color=INK,
                linestyle="none",
                clip_on=False,
                zorder=4,
            )
    _node_axis(axes, [size for plan in plans for size in plan.results])


def _node_axis(axes: "Axes", sizes: Sequence[int]) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    low, high = min(sizes), max(sizes)
    if high > WIDE * low:
        axes.set_xscale("log", base=2)
        ticks = [low]
        while 2 * ticks[-1] <= high:
            ticks.append(2 * ticks[-1])
        axes.set_xticks(ticks[:: 1 + len(ticks) // TICKS_MAX])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.locator_params(axis="x", nbins=TICKS_MAX, integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", pad=7)
    axes.set_xlabel("nodes")


def _scale(objective: Objective, highest: float) -> tuple[float, str]:
    if objective.unit == "time":
        unit = time_unit(highest)
        return unit.seconds, unit.name
    if is_percentage(objective):
        return 0.01, "percent"
    return 1.0, "cost" if objective.unit == "money" else objective.metric
