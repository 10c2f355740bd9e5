"""Plots of single runs: staleness per buffer, load per instance, swimlanes of trajectories."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from plexrl.sim.report.plots.figure import GROUND, INK, Key, Picture, Plot, draw
from plexrl.sim.report.plots.style import JOB_COLOURS
from plexrl.sim.report.units import time_unit
from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.results.recorder import Lane, RecordedLoad, Recorder
from plexrl.sim.rollout.setting import Setting, SystemName

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = tuple[Setting, RolloutOutcome, Recorder]
Item = TypeVar("Item")

WIDE = 13.0
INSTANCES_MAX = 4
"""Instances of a picture of loads, evenly spaced."""
LANES_MAX = 64
"""Trajectories of a picture of swimlanes, evenly spaced in the order of their start."""
STALENESS_COLOURS = ("#cfe3f7", "#8fbce8", "#4590de", "#1f5fa8", "#103a6b", "#d55e00")
"""By staleness; larger ones have the last colour."""
RUNNING_COLOUR = "#4590de"
WAITING_COLOUR = "#d55e00"
UPDATE_COLOUR = "#3d9a50"


def staleness_plot(histories: Sequence[History]) -> Plot | None:
    """Stacked bars per training step; None without a system that has a staleness bound."""
    shown = [history for history in histories if history[1].system.name == SystemName.STALEFLOW]
    if not shown:
        return None
    last = len(STALENESS_COLOURS) - 1
    seen = {
        min(staleness, last)
        for _, _, recorder in shown
        for step in recorder.steps
        for staleness in step.staleness
    }
    return Plot(
        name="staleness",
        title="Staleness of each buffer",
        says="Trajectories that were trained in each step, by the version that was trained less "
        "the oldest version in the trajectory. A bar is one buffer.",
        pictures=tuple(
            Picture(title=outcome.system.label, svg=_staleness(f"staleness{at}", recorder))
            for at, (_, outcome, recorder) in enumerate(shown)
        ),
        keys=tuple(
            Key(
                label=f"{value} or more" if value == last else f"{value}",
                colour=STALENESS_COLOURS[value],
            )
            for value in sorted(seen)
        ),
    )


def load_plot(histories: Sequence[History]) -> Plot | None:
    """Running and waiting trajectories of some instances over time; None without histories."""
    if not histories:
        return None
    end_s = max(recorder.end_s for _, _, recorder in histories)
    most = max(
        load.running + load.waiting
        for _, _, recorder in histories
        for loads in recorder.loads.values()
        for load in loads
    )
    unit = time_unit(end_s)
    return Plot(
        name="load",
        title="Load of instances",
        says=f"Trajectories that run and that wait in the engine's queue on up to {INSTANCES_MAX} "
        f"instances, over time in {unit.name}. A green line is an update, with its version.",
        pictures=tuple(
            Picture(
                title=f"{outcome.system.label}, {recorder.instances} instances",
                svg=_loads(f"load{at}", recorder, end_s, most),
            )
            for at, (_, outcome, recorder) in enumerate(histories)
        ),
        keys=(
            Key(label="running", colour=RUNNING_COLOUR, dash=()),
            Key(label="waiting", colour=WAITING_COLOUR, dash=()),
            Key(label="update", colour=UPDATE_COLOUR, dash=()),
        ),
    )


def lane_plot(histories: Sequence[History]) -> Plot | None:
    """Trajectories of the last buffers; None without histories."""
    if not histories:
        return None
    versions = sorted(
        {
            segment.version
            for _, _, recorder in histories
            for lane in _chosen(recorder.lanes)
            for segment in lane.segments
        }
    )
    return Plot(
        name="lanes",
        title="Trajectories",
        says=f"Up to {LANES_MAX} trajectories of the last buffers, a row each, in the order of "
        "their start. A bar is decoded on one instance with one version, which is its colour; "
        "between bars a trajectory waits, is routed or prefilled.",
        pictures=tuple(
            Picture(title=outcome.system.label, svg=_lanes(f"lanes{at}", recorder))
            for at, (_, outcome, recorder) in enumerate(histories)
        ),
        keys=tuple(
            Key(label=f"version {version}", colour=_colour(version)) for version in versions
        ),
        wide=True,
    )


def _staleness(name: str, recorder: Recorder) -> "Markup":
    last = len(STALENESS_COLOURS) - 1

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for step in recorder.steps:
            below = 0
            for staleness, count in sorted(step.staleness.items()):
                colour = STALENESS_COLOURS[min(staleness, last)]
                axes.bar(step.version, count, bottom=below, width=0.8, color=colour)
                below += count
        axes.set(xlabel="version that is trained", ylabel="trajectories")
        axes.locator_params(axis="x", integer=True)
        axes.grid(visible=False, axis="x")

    return draw(name, (5.8, 2.6), paint, describes="Staleness per buffer as stacked bars")


def _loads(name: str, recorder: Recorder, end_s: float, most: int) -> "Markup":
    """Loads of some instances, on axes that all pictures share."""
    unit = time_unit(end_s)
    numbers = _spaced(sorted(recorder.loads), INSTANCES_MAX)

    def paint(figure: "Figure") -> None:
        rows = figure.subplots(len(numbers), 1, sharex=True, squeeze=False)[:, 0]
        for axes, number in zip(rows, numbers, strict=True):
            loads = recorder.loads[number]
            times = [load.at_s / unit.seconds for load in loads]
            for colour, values in (
                (RUNNING_COLOUR, [load.running for load in loads]),
                (WAITING_COLOUR, [load.waiting for load in loads]),
            ):
                axes.plot(times, values, color=colour, linewidth=1.2, drawstyle="steps-post")
            _updates(axes, loads, unit.seconds, 1.12 * most)
            axes.set(ylim=(0, 1.3 * most), xlim=(0, end_s / unit.seconds), ylabel=f"no. {number}")
        rows[-1].set_xlabel(unit.name)

    size = (5.8, 0.5 + 1.15 * len(numbers))
    return draw(name, size, paint, describes="Running and waiting trajectories over time")


def _updates(axes: "Axes", loads: Sequence[RecordedLoad], unit_s: float, top: float) -> None:
    """Mark where an instance has a new version."""
    for before, load in pairwise(loads):
        if load.version != before.version:
            at = load.at_s / unit_s
            axes.axvline(at, color=UPDATE_COLOUR, linewidth=0.8)
            axes.annotate(f"{load.version}", (at, top), fontsize=6.5, color=INK, ha="left")


def _lanes(name: str, recorder: Recorder) -> "Markup":
    lanes = _chosen(recorder.lanes)
    start_s = min(lane.segments[0].start_s for lane in lanes)
    end_s = max(lane.segments[-1].end_s for lane in lanes)
    unit = time_unit(end_s - start_s)
    titles = {}

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.set_facecolor(GROUND)
        for row, lane in enumerate(lanes):
            for index, part in enumerate(lane.segments):
                bar = axes.broken_barh(
                    [
                        (
                            (part.start_s - start_s) / unit.seconds,
                            (part.end_s - part.start_s) / unit.seconds,
                        )
                    ],
                    (row - 0.42, 0.84),
                    facecolors=_colour(part.version),
                    edgecolor=GROUND,
                    linewidth=0.4,
                )
                bar.set_gid(f"bar{row}x{index}")
                titles[f"bar{row}x{index}"] = (
                    f"prompt {lane.group}, trained at version {lane.buffer}: {part.tokens:,} "
                    f"tokens of version {part.version} on instance {part.instance}"
                )
        axes.set(ylim=(len(lanes) - 0.4, -0.6), xlim=(0, (end_s - start_s) / unit.seconds))
        axes.set(yticks=[], xlabel=f"{unit.name} from the first start")
        axes.grid(visible=False)

    size = (WIDE, 0.6 + 0.085 * max(len(lanes), 12))
    return draw(name, size, paint, describes="Trajectories over time", titles=titles)


def _chosen(lanes: Sequence[Lane]) -> list[Lane]:
    ordered = sorted(lanes, key=lambda lane: (lane.segments[0].start_s, lane.group))
    return _spaced(ordered, LANES_MAX)


def _colour(version: int) -> str:
    return JOB_COLOURS[version % len(JOB_COLOURS)]


def _spaced(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, evenly spaced, first and last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]
