"""Plots a job's metrics as a line of block characters or as a file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from plexrl.errors import InvalidRequestError, StorageError
from plexrl.wire.messages.views import MetricsRow

FORMATS = (".png", ".svg", ".pdf")
COLUMNS_MAX = 3
PLOT_INCHES = (4.0, 2.6)
"""Size of the plot of one metric."""


def trend(values: Sequence[float], points: int) -> str:
    """The finite values as at most `points` block characters, scaled from minimum to maximum."""
    from plexrl.cli.terminal.sparkline import sparkline

    finite = [value for value in values if math.isfinite(value)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    span = (most - least) or 1.0
    return sparkline([(value - least) / span for value in finite], points)


def write_plot(path: Path, title: str, rows: Sequence[MetricsRow], names: Sequence[str]) -> None:
    """Draw each metric over the steps into a file, in the format of its suffix. Raises as
    `write_plots`."""
    write_plots(path, title, {"": rows}, names)


def write_plots(
    path: Path, title: str, series: Mapping[str, Sequence[MetricsRow]], names: Sequence[str]
) -> None:
    """As `write_plot`, with a line for each of several jobs, which a legend names.

    Raises:
        InvalidRequestError: unknown format, no metrics, or matplotlib is not installed.
        StorageError: the file cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise InvalidRequestError(
            f"{path} has no known format: name it *{', *'.join(FORMATS[:-1])} or *{FORMATS[-1]}"
        )
    if not names:
        raise InvalidRequestError("the job has logged no metrics: there is nothing to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequestError(
            "a plot needs matplotlib: pip install 'plexrl[demo]'; `--csv` needs nothing"
        ) from error
    across = min(COLUMNS_MAX, len(names))
    down = -(-len(names) // across)
    size = (across * PLOT_INCHES[0], down * PLOT_INCHES[1] + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(down, across, squeeze=False).flat
    for axis in list(axes)[len(names) :]:
        axis.set_axis_off()
    for name, axis in zip(names, axes, strict=False):
        for job, rows in series.items():
            points = [(row["step"], row["values"][name]) for row in rows if name in row["values"]]
            if points:
                axis.plot(*zip(*points, strict=True), linewidth=1.2, label=job or None)
        axis.set_title(name, fontsize="medium")
        axis.set_xlabel("step")
        axis.grid(visible=True, alpha=0.3)
    if len(series) > 1:
        lines = figure.axes[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise StorageError(
            f"the plot cannot be written: {error}: name another file by --plot"
        ) from error
