"""Metrics that controllers report: one JSON line for each row, one file for each job.

metrics/<tenant>/<job>/rows.jsonl

Before, the file was `metrics/<job>.jsonl`; it is renamed when its job is used.
"""

import json
import os
import threading
import time
from collections import OrderedDict
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import quote

import msgspec

from plexrl.client.data.metric_rows import json_number
from plexrl.errors import PayloadTooLargeError, QuotaExceededError
from plexrl.process.folders.durable_files import flush, make_folders_durably, rename_durably
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.router.blobs.upload import write_all, write_error
from plexrl.router.job_files.record_store import JobKey

FOLDER = "metrics"
PAGE_BYTES = 1 << 20
"""Approximate size of a page of rows."""
PLACES_MAX = 10_000
"""Ends of pages that are remembered; readers that poll need one each."""
NAME_BYTES_MAX = 255
"""Of a file; with a longer one the earlier version could not write."""
CLOCKS_DIFFER_S = 60.0
"""Between the scheduler, which says when a job was submitted, and the router that wrote a row."""


class _Step(msgspec.Struct):
    """The step of a row."""

    step: int


class _Time(msgspec.Struct):
    """When a row was written."""

    time: float


class MetricsLog(Protocol):
    """Metrics of all jobs. Rows of a job are numbered from 1, without gaps. The methods block."""

    def take_over(self, job: JobKey, submitted_at: float) -> None:
        """Move the rows that an earlier version has kept by the job's id alone to this tenant's
        job, unless they are of a job that was submitted before. To be called before the other
        methods. Raises as `append`."""
        ...

    def append(self, job: JobKey, step: int, values: dict[str, float]) -> None:
        """Add a row. NaN and infinite numbers, which JSON cannot express, become the strings
        `NaN`, `Infinity` or `-Infinity`.

        Raises:
            PayloadTooLargeError: the row is too large.
            QuotaExceededError: the job has reached its bound on bytes of metrics.
            StorageError: the file cannot be written; it is unchanged.
            StoreUnavailableError: the object store does not answer.
        """
        ...

    def page(self, job: JobKey, after: int) -> bytes:
        """JSON `{"rows": […]}`: rows after number `after`, each with its number as `index`, and
        with the former step as `rewinds_from` if its step is lower. At most about `PAGE_BYTES`; an
        empty page means that there are no more. Raises `StoreUnavailableError`."""
        ...

    def close(self) -> None:
        """End what runs in the background."""
        ...


class MetricsFiles:
    """Metrics of all jobs, in files under one directory, which all routers share."""

    def __init__(self, directory: Path, *, row_bytes_max: int, job_bytes_max: int) -> None:
        self._directory = directory
        self._row_bytes_max = row_bytes_max
        self._job_bytes_max = job_bytes_max
        self._lock = threading.Lock()
        self._places: OrderedDict[tuple[JobKey, int], tuple[int, int]] = OrderedDict()
        """By the number of a page's last row: the file, and where the row begins in it. There the
        next page begins."""
        make_private_folder(directory / FOLDER)

    def take_over(self, job: JobKey, submitted_at: float) -> None:
        path = self._path(job)
        earlier = self._directory / FOLDER / f"{quote(job.job, safe='')}.jsonl"
        try:
            if path.exists() or len(earlier.name) > NAME_BYTES_MAX or not earlier.exists():
                return
            with earlier.open("rb") as file:
                if not is_of_job(file.readline(), submitted_at):
                    return
            make_folders_durably(path.parent, mode=0o700)
            rename_durably(earlier, path)
            flush(earlier.parent)
        except FileNotFoundError:
            # Another router has renamed it.
            return
        except OSError as error:
            raise write_error(self._directory, error) from error

    def append(self, job: JobKey, step: int, values: dict[str, float]) -> None:
        line = encode_row(step, values, self._row_bytes_max)
        try:
            path = self._path(job)
            make_folders_durably(path.parent, mode=0o700)
            with path.open("a+b", buffering=0) as file:
                size = _drop_partial_line(file)
                check_quota(job, size, len(line), self._job_bytes_max)
                try:
                    write_all(file.fileno(), [line])
                    os.fsync(file.fileno())
                    if not size:
                        flush(path.parent)
                except OSError:
                    # A partial line would make the whole file unreadable.
                    file.truncate(size)
                    raise
        except OSError as error:
            raise write_error(self._directory, error) from error

    def page(self, job: JobKey, after: int) -> bytes:
        try:
            with self._path(job).open("rb") as file:
                return encode_page(self._rows(job, file, after))
        except FileNotFoundError:
            return encode_page([])

    def close(self) -> None:
        """Release nothing: no file stays open, and no work runs in the background."""

    def _rows(self, job: JobKey, file: BinaryIO, after: int) -> list[bytes]:
        rows: list[bytes] = []
        size = 0
        before: bytes | None = None
        index, offset = self._begin(job, file, after)
        for line in file:
            # A last line without its newline is still being written.
            if size >= PAGE_BYTES or not line.endswith(b"\n"):
                break
            index += 1
            if index > after:
                rows.append(numbered(index, line, before))
                size += len(line)
            before = line if index >= after else None
            offset += len(line)
        if before is not None:
            self._remember(job, file, index, offset - len(before))
        return rows

    def _begin(self, job: JobKey, file: BinaryIO, after: int) -> tuple[int, int]:
        """Go to the row of this number or to an earlier one; returns how many rows and bytes are
        before it."""
        with self._lock:
            number, offset = self._places.get((job, after), (0, 0))
        if number != os.fstat(file.fileno()).st_ino:
            return 0, 0
        return after - 1, file.seek(offset)

    def _remember(self, job: JobKey, file: BinaryIO, index: int, offset: int) -> None:
        with self._lock:
            self._places[job, index] = os.fstat(file.fileno()).st_ino, offset
            self._places.move_to_end((job, index))
            if len(self._places) > PLACES_MAX:
                self._places.popitem(last=False)

    def _path(self, job: JobKey) -> Path:
        return self._directory / job.folder(FOLDER) / "rows.jsonl"


def _drop_partial_line(file: FileIO) -> int:
    """Cut off what a power cut left of a row that was not acknowledged; returns the size."""
    size = file.seek(0, os.SEEK_END)
    if not size or os.pread(file.fileno(), 1, size - 1) == b"\n":
        return size
    start = max(0, size - PAGE_BYTES)
    size = start + os.pread(file.fileno(), size - start, start).rfind(b"\n") + 1
    file.truncate(size)
    return size


def is_of_job(line: bytes, submitted_at: float) -> bool:
    """Whether a job's first row was written after the job was submitted. Another tenant may have
    had a job of this id before, and its rows are not this one's."""
    try:
        return msgspec.json.decode(line, type=_Time).time >= submitted_at - CLOCKS_DIFFER_S
    except msgspec.MsgspecError:
        return False


def encode_row(step: int, values: dict[str, float], bytes_max: int) -> bytes:
    """A row as a line of JSON. Raises `PayloadTooLargeError`."""
    written = {name: json_number(value) for name, value in values.items()}
    row = {"step": step, "time": time.time(), "values": written}
    line = json.dumps(row).encode() + b"\n"
    if len(line) > bytes_max:
        raise PayloadTooLargeError(
            f"a row of metrics has {len(line)} bytes; the bound is {bytes_max}: "
            "report fewer values, or split them into several rows",
            metrics_row_bytes_max=bytes_max,
        )
    return line


def check_quota(job: JobKey, used_bytes: int, row_bytes: int, bytes_max: int) -> None:
    """Check that a job may add a row. Raises `QuotaExceededError`."""
    if used_bytes + row_bytes > bytes_max:
        raise QuotaExceededError(
            f"job {job.job!r} has {used_bytes} bytes of metrics; the bound is {bytes_max}: report "
            "less often, or have the operator raise metrics_job_bytes_max",
            used=used_bytes,
            quota=bytes_max,
        )


def numbered(index: int, line: bytes, before: bytes | None) -> bytes:
    """A row with its number, as JSON. One with a lower step than the row `before` it is marked:
    `rewinds_from` is that row's step."""
    text = b'{"index": %d, %s' % (index, line[1:-1])
    if before is not None:
        former = msgspec.json.decode(before, type=_Step).step
        if msgspec.json.decode(line, type=_Step).step < former:
            return b'%s, "rewinds_from": %d}' % (text[:-1], former)
    return text


def encode_page(rows: list[bytes]) -> bytes:
    """Numbered rows as the JSON of a page."""
    return b'{"rows": [' + b", ".join(rows) + b"]}"
