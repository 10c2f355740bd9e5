"""Metrics that controllers report: one JSON line for each row, one file for each job."""

import json
import os
import time
from pathlib import Path
from urllib.parse import quote

from plexrl.client.data.metric_rows import json_number
from plexrl.errors import PayloadTooLargeError, QuotaExceededError
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.router.blobs.store import write_all, write_error

PAGE_BYTES = 1 << 20
"""Approximate size of a page of rows."""


class MetricsLog:
    """Metrics of all jobs, in files under one directory."""

    def __init__(self, directory: Path, *, row_bytes_max: int, job_bytes_max: int) -> None:
        self._directory = directory
        self._row_bytes_max = row_bytes_max
        self._job_bytes_max = job_bytes_max
        make_private_folder(directory)

    def append(self, job: str, step: int, values: dict[str, float]) -> None:
        """Add a row. NaN and infinite numbers, which JSON cannot express, become the strings
        `NaN`, `Infinity` or `-Infinity`.

        Raises:
            PayloadTooLargeError: the row is too large.
            QuotaExceededError: the job has reached its bound on bytes of metrics.
            StorageError: the file cannot be written; it is unchanged.
        """
        written = {name: json_number(value) for name, value in values.items()}
        row = {"step": step, "time": time.time(), "values": written}
        line = json.dumps(row).encode() + b"\n"
        if len(line) > self._row_bytes_max:
            raise PayloadTooLargeError(
                f"a row of metrics has {len(line)} bytes; the bound is {self._row_bytes_max}: "
                "report fewer values, or split them into several rows",
                metrics_row_bytes_max=self._row_bytes_max,
            )
        try:
            with self._path(job).open("ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if size + len(line) > self._job_bytes_max:
                    raise QuotaExceededError(
                        f"job {job!r} has {size} bytes of metrics; the bound is "
                        f"{self._job_bytes_max}: report less often, or have the operator raise "
                        "metrics_job_bytes_max",
                        used=size,
                        quota=self._job_bytes_max,
                    )
                try:
                    write_all(file.fileno(), [line])
                except OSError:
                    # A partial line would make the whole file unreadable.
                    file.truncate(size)
                    raise
        except OSError as error:
            raise write_error(self._directory, error) from error

    def page(self, job: str, after: int) -> bytes:
        """JSON `{"rows": […]}`: rows after number `after`, counted from 1, each with its `index`.
        At most about `PAGE_BYTES`; an empty page means that there are no more."""
        path = self._path(job)
        rows: list[bytes] = []
        size = 0
        if path.exists():
            with path.open("rb") as file:
                for index, line in enumerate(file, start=1):
                    # A last line without its newline is still being written.
                    if index <= after or not line.endswith(b"\n"):
                        continue
                    rows.append(b'{"index": %d, %s' % (index, line[1:-1]))
                    size += len(line)
                    if size >= PAGE_BYTES:
                        break
        return b'{"rows": [' + b", ".join(rows) + b"]}"

    def _path(self, job: str) -> Path:
        return self._directory / f"{quote(job, safe='')}.jsonl"
