"""What an experiment tracker does for a job, and which trackers there are.

The rows of a job's metrics on the cluster are the one source. A tracker only copies them, and says
itself which row it has copied last. So a controller that is killed at any moment neither loses rows
in a tracker nor copies them twice: the next one continues after that row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol

from plexrl.errors import InvalidRequestError
from plexrl.wire.messages.views import MetricsRow

PACKAGES: Final = {
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""The trackers, and the Python package that each one needs."""
ROW_KEY: Final = "plexrl/row"
"""In each copied row: the index of the row in the job's metrics."""
REWINDS_KEY: Final = "plexrl/rewinds_from"
"""In a copied row with a lower step than the row before it: that row's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run of a tracker that stands for a job."""

    job: str
    """The job's id, which is the run's id too."""
    name: str
    """The job's name."""
    folder: Path
    """Directory for the tracker's files."""


class Tracker(Protocol):
    """A run of a tracker that is open for writing. The methods block; any may raise an error of the
    tracker's library."""

    def last_row(self) -> int:
        """Index of the last row that the run has; 0: none."""
        ...

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Add rows, in order."""
        ...

    def close(self, outcome: str | None) -> None:
        """Write what is left. `outcome` is `completed`, `failed` or `cancelled`; None: the job goes
        on."""
        ...


def check_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """The names without repetitions; `names` may be a text with commas.

    Raises:
        InvalidRequestError: a tracker is unknown, or its library is not installed.
    """
    if isinstance(names, str):
        names = names.split(",")
    wanted = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in wanted:
        if name not in PACKAGES:
            known = ", ".join(PACKAGES)
            raise InvalidRequestError(f"there is no tracker {name!r}: trackers has some of {known}")
        if find_spec(PACKAGES[name]) is None:
            raise InvalidRequestError(
                f"tracker {name!r} needs a library: pip install 'plexrl[{name}]'"
            )
    return wanted


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Open the run, which is made at its first row. Raises errors of the tracker's library."""
    tracker: Tracker = import_module(f"plexrl.client.trackers.{name}").open_run(run)
    return tracker


def marked_values(row: MetricsRow) -> dict[str, float]:
    """The row's values, with its index and the mark of a falling step."""
    values = {**row["values"], ROW_KEY: float(row["index"])}
    if "rewinds_from" in row:
        values[REWINDS_KEY] = float(row["rewinds_from"])
    return values
