"""TensorBoard: event files in one folder for each job.

All values of a row are one record of an event file, so a row is there as a whole or not at all.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from plexrl.client.trackers.tracker import ROW_KEY, TrackedRun, marked_values
from plexrl.wire.messages.views import MetricsRow


class TensorBoardRun:
    """Event files of one job; each controller of the job adds a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_row = max(_rows(folder), default=0)
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def last_row(self) -> int:
        return self._last_row

    def write(self, rows: Sequence[MetricsRow]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in marked_values(row).items()
            ]
            summary = Summary(value=values)
            self._writer.add_event(Event(wall_time=row["time"], step=row["step"], summary=summary))
        self._writer.flush()

    def close(self, outcome: str | None) -> None:
        del outcome
        self._writer.close()


def open_run(run: TrackedRun) -> TensorBoardRun:
    """Open the event files of a job."""
    return TensorBoardRun(run.folder / run.job)


def _rows(folder: Path) -> Iterator[int]:
    """Indices of the rows in the event files. A record that a kill cut off counts for nothing."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag == ROW_KEY:
                    # float32 in the file: exact up to 16 million rows.
                    yield int(value.simple_value)
