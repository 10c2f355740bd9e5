"""Bar plot of throughputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plexrl.sim.report.plots.figure import Picture, Plot, draw
from plexrl.sim.rollout.results.gains import gain_over_sync
from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.setting import SystemName

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

COLOURS = {
    SystemName.SYNC: "#858c94",
    SystemName.STALEFLOW: "#2a6fbb",
    SystemName.TAIL: "#b58ad6",
    SystemName.FLEXES: "#7a3fae",
}


def throughput_plot(outcomes: Sequence[RolloutOutcome]) -> Plot | None:
    """One picture per limit; None for a single run."""
    if len(outcomes) < 2:
        return None
    limits = list(dict.fromkeys(outcome.limit for outcome in outcomes))
    longest = max(outcome.throughput for outcome in outcomes)
    return Plot(
        name="throughput",
        title="Throughput",
        says="Trained tokens per second after the first steps, and in brackets by those of sync "
        "(tail and flexes: by its time for the same prompts); longer is better.",
        pictures=tuple(
            Picture(
                title=f"responses of at most {limit:,} tokens",
                svg=_bars(f"throughput{at}", [o for o in outcomes if o.limit == limit], longest),
            )
            for at, limit in enumerate(limits)
        ),
    )


def _bars(name: str, outcomes: Sequence[RolloutOutcome], longest: float) -> "Markup":
    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, each in enumerate(outcomes):
            axes.barh(place, each.throughput, height=0.62, color=COLOURS[each.system.name])
            gain = gain_over_sync(each, outcomes)
            ratio = "" if gain is None else f"  ({gain:.2f})"
            axes.annotate(f" {each.throughput:,.0f}{ratio}", (each.throughput, place), va="center")
        axes.set_yticks(range(len(outcomes)), [outcome.system.label for outcome in outcomes])
        axes.set(ylim=(len(outcomes) - 0.5, -0.5), xlim=(0, 1.25 * longest), xlabel="tokens/s")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.grid(visible=False, axis="y")

    size = (5.8, 0.75 + 0.3 * len(outcomes))
    return draw(name, size, paint, describes="Throughput as bars")
