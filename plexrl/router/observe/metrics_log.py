"""Metrics that controllers report: one JSON line a row, one file a job, both bounded."""

import json
import math
import os
import time
from pathlib import Path
from urllib.parse import quote

from plexrl.errors import PayloadTooLargeError, QuotaExceededError
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.router.blobs.store import unwritable, write_all

PAGE_BYTES = 1 << 20
"""About as much is read at a time."""


class MetricsLog:
    """Files under one directory."""

    def __init__(self, directory: Path, *, row_bytes_max: int, job_bytes_max: int) -> None:
        self._directory = directory
        self._row_bytes_max = row_bytes_max
        self._job_bytes_max = job_bytes_max
        make_private_folder(directory)

    def append(self, job: str, step: int, values: dict[str, float]) -> None:
        """Add a row; a number that is not finite, which JSON has not, as `NaN`, `Infinity` or
        `-Infinity` in quotes.

        Raises:
            PayloadTooLargeError: the row is too large.
            QuotaExceededError: the job has as many bytes of metrics as it may have.
            StorageError: the file cannot be written; it stays as it was.
        """
        written = {name: _written(value) for name, value in values.items()}
        row = {"step": step, "time": time.time(), "values": written}
        line = json.dumps(row).encode() + b"\n"
        if len(line) > self._row_bytes_max:
            raise PayloadTooLargeError(
                f"a row of metrics has {len(line)} bytes, and {self._row_bytes_max} are the most: "
                "report fewer values, or in several rows",
                metrics_row_bytes_max=self._row_bytes_max,
            )
        try:
            with self._path(job).open("ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if size + len(line) > self._job_bytes_max:
                    raise QuotaExceededError(
                        f"job {job!r} has {size} bytes of metrics, and {self._job_bytes_max} are "
                        "the most: report less often, or have the operator raise "
                        "metrics_job_bytes_max",
                        used=size,
                        quota=self._job_bytes_max,
                    )
                try:
                    write_all(file.fileno(), [line])
                except OSError:
                    # Half a line would make the whole file unreadable.
                    file.truncate(size)
                    raise
        except OSError as error:
            raise unwritable(self._directory, error) from error

    def page(self, job: str, after: int) -> bytes:
        """As JSON, `{"rows": […]}`: rows behind number `after`, counted from 1, each with its
        `index`. About `PAGE_BYTES` of them at most; there are no more where there are none."""
        path = self._path(job)
        rows: list[bytes] = []
        size = 0
        if path.exists():
            with path.open("rb") as file:
                for index, line in enumerate(file, start=1):
                    # A last line without its end is being written.
                    if index <= after or not line.endswith(b"\n"):
                        continue
                    rows.append(b'{"index": %d, %s' % (index, line[1:-1]))
                    size += len(line)
                    if size >= PAGE_BYTES:
                        break
        return b'{"rows": [' + b", ".join(rows) + b"]}"

    def _path(self, job: str) -> Path:
        return self._directory / f"{quote(job, safe='')}.jsonl"


def _written(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
