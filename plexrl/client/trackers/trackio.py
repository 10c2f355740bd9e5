"""Trackio: one run for each job, in Trackio's own database on this machine."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from plexrl.client.trackers.tracker import ROW_KEY, TrackedRun, marked_values
from plexrl.wire.messages.views import MetricsRow

if TYPE_CHECKING:
    from trackio.run import Run

PROJECT = "plexrl"


class TrackioRun:
    """One run of Trackio."""

    def __init__(self, run: "Run", last_row: int) -> None:
        self._run = run
        self._last_row = last_row

    def last_row(self) -> int:
        return self._last_row

    def write(self, rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            self._run.log(marked_values(row), step=row["step"])

    def close(self, outcome: str | None) -> None:
        del outcome
        self._run.finish()


def open_run(run: TrackedRun) -> TrackioRun:
    """Open the run of a job, or make it."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    project = os.environ.get("TRACKIO_PROJECT") or PROJECT
    rows = SQLiteStorage.get_logs(project, run.job)
    last_row = max((int(row.get(ROW_KEY, 0)) for row in rows), default=0)
    opened = trackio.init(
        project, run.job, resume="allow", auto_log_gpu=False, auto_log_cpu=False, embed=False
    )
    return TrackioRun(opened, last_row)
