"""Metrics of jobs in an object store, for routers on several machines.

    metrics/<tenant>/<job>/rows/<number>    one row, created once and never changed
    metrics/<tenant>/<job>/pages/<number>   `PAGE_ROWS` rows, which replace their objects

A router appends by creating the object of the next number. If another router has created it, the
next number is tried. So rows are never lost or renumbered, and have no gaps. Any router may write a
full page, since all routers would write the same.

Before, the keys were without `<tenant>`; such objects are moved when their job is used.
"""

import logging
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

from plexrl.errors import PlexRLError
from plexrl.router.job_files.metrics_log import (
    PAGE_BYTES,
    check_quota,
    encode_page,
    encode_row,
    is_of_job,
    numbered,
)
from plexrl.router.job_files.record_store import JobKey
from plexrl.storage.object_store import ObjectStore

LOG = logging.getLogger(__name__)

PAGE_ROWS = 500
JOBS_MAX = 10_000
"""Jobs whose last row is remembered, and jobs known to have no rows in the earlier place."""
END_KEPT_S = 3600.0
"""How long a last row is remembered without a further one. The rows of a forgotten job are deleted
much later, and a new job of its id begins at 1."""
READ_AT_ONCE = 64
"""Rows that are read together."""
ATTEMPTS = 5
"""Rows that a reader has listed may have become a page meanwhile; then it lists again."""


@dataclass(slots=True)
class _End:
    """The last known row of a job."""

    index: int
    nbytes: int
    """Size of all rows."""
    used_at: float = 0.0
    """By the monotonic clock."""


@dataclass(frozen=True, slots=True)
class _Listing:
    pages: dict[int, int]
    """Sizes of pages by number, from 0."""
    rows: dict[int, int]
    """Sizes of rows that are in no page, by number, from 1."""
    replaced: tuple[str, ...]
    """Objects of rows that are in pages too."""
    end: _End


class MetricsObjects:
    """Metrics of all jobs, in one object store."""

    def __init__(
        self,
        store: ObjectStore,
        router: str,
        *,
        row_bytes_max: int,
        job_bytes_max: int,
        page_rows: int = PAGE_ROWS,
    ) -> None:
        """`page_rows` must be equal at all routers."""
        self._store = store
        self._router = router
        self._row_bytes_max = row_bytes_max
        self._job_bytes_max = job_bytes_max
        self._page_rows = page_rows
        self._lock = threading.Lock()
        self._ends: OrderedDict[JobKey, tuple[threading.Lock, _End | None]] = OrderedDict()
        self._moved: OrderedDict[JobKey, None] = OrderedDict()
        self._is_probed = False
        self._is_conditional = False
        self._pages = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    def take_over(self, job: JobKey, submitted_at: float) -> None:
        with self._lock:
            if job in self._moved:
                return
        # Another router may do the same: both write equal objects, and one that is not found was
        # deleted by the other when it had written all.
        with suppress(FileNotFoundError):
            self._move(job, submitted_at)
        with self._lock:
            self._moved[job] = None
            if len(self._moved) > JOBS_MAX:
                self._moved.popitem(last=False)

    def append(self, job: JobKey, step: int, values: dict[str, float]) -> None:
        line = encode_row(step, values, self._row_bytes_max)
        self._probe()
        with self._lock:
            lock = self._ends.setdefault(job, (threading.Lock(), None))[0]
        with lock:
            end = self._end(job)
            check_quota(job, end.nbytes, len(line), self._job_bytes_max)
            while not self._is_stored(job, end, line):
                check_quota(job, end.nbytes, len(line), self._job_bytes_max)
            self._remember(job, lock, end)
        if end.index % self._page_rows == 0:
            self._pages.submit(self._write_pages, job)

    def page(self, job: JobKey, after: int) -> bytes:
        for _ in range(ATTEMPTS - 1):
            try:
                return self._page(job, after)
            except FileNotFoundError:
                continue
        return self._page(job, after)

    def close(self) -> None:
        """Stop writing pages; a router writes them later."""
        self._pages.shutdown(cancel_futures=True)

    def _move(self, job: JobKey, submitted_at: float) -> None:
        folder = f"metrics/{quote(job.job, safe='')}"
        found = [each.key.removeprefix(f"{folder}/") for each in self._store.find(folder)]
        # Below are also the jobs of a tenant of this name: those have one more folder.
        names = [name for name in found if re.fullmatch("(rows|pages)/[0-9]+", name)]
        if not names:
            return
        first = self._store.read(f"{folder}/{names[0]}").partition(b"\n")[0]
        if not is_of_job(first, submitted_at):
            return

        def copy(name: str) -> None:
            self._store.write(f"{_folder(job)}/{name}", self._store.read(f"{folder}/{name}"))

        self._store.each(copy, names)
        # The first one last, for it says whose they are.
        self._store.delete(f"{folder}/{name}" for name in names[1:])
        self._store.delete([f"{folder}/{names[0]}"])

    def _is_stored(self, job: JobKey, end: _End, line: bytes) -> bool:
        """Try to store a row after `end`, and move `end` to the last row that is stored now."""
        key = _row_key(job, end.index + 1)
        found: bytes | None = line
        # Without conditional writes, only rows that are stored at the same moment collide.
        is_taken = not self._is_conditional and self._read_row(key) is not None
        if is_taken or not self._store.create(key, line):
            found = self._read_row(key)
        if found is None or self._has_page(job, end.index // self._page_rows):
            # `end` is old: the row is in a page, and its object was deleted. An object that was
            # created just now counts for nothing, and goes with the next page.
            listed = self._listing(job).end
            end.index, end.nbytes = listed.index, listed.nbytes
            return False
        end.index += 1
        end.nbytes += len(found)
        # A repeated attempt finds the row that its first attempt has stored.
        return found == line

    def _read_row(self, key: str) -> bytes | None:
        try:
            return self._store.read(key)
        except FileNotFoundError:
            return None

    def _has_page(self, job: JobKey, number: int) -> bool:
        try:
            self._store.size(_page_key(job, number))
        except FileNotFoundError:
            return False
        return True

    def _end(self, job: JobKey) -> _End:
        with self._lock:
            known = self._ends[job][1]
        if known is None or time.monotonic() - known.used_at > END_KEPT_S:
            return self._listing(job).end
        return known

    def _remember(self, job: JobKey, lock: threading.Lock, end: _End) -> None:
        end.used_at = time.monotonic()
        with self._lock:
            self._ends[job] = lock, end
            self._ends.move_to_end(job)
            oldest = next(iter(self._ends))
            # A lock in use must stay the job's only one.
            if len(self._ends) > JOBS_MAX and not self._ends[oldest][0].locked():
                del self._ends[oldest]

    def _page(self, job: JobKey, after: int) -> bytes:
        listing = self._listing(job)
        found: list[bytes] = []
        size = 0
        before: bytes | None = None
        # From one row earlier, whose step shows whether the first one's is lower.
        index = max(after, 1)
        while size < PAGE_BYTES:
            number = (index - 1) // self._page_rows
            if number in listing.pages:
                lines = self._store.read(_page_key(job, number)).splitlines(keepends=True)
                lines = lines[(index - 1) % self._page_rows :]
            else:
                wanted = range(index, index + READ_AT_ONCE)
                lines = self._rows(job, [each for each in wanted if each in listing.rows])
            if not lines:
                break
            for line in lines:
                if size >= PAGE_BYTES:
                    break
                if index > after:
                    found.append(numbered(index, line, before))
                    size += len(line)
                before = line
                index += 1
        return encode_page(found)

    def _rows(self, job: JobKey, indices: list[int]) -> list[bytes]:
        found: dict[int, bytes] = {}

        def read(index: int) -> None:
            found[index] = self._store.read(_row_key(job, index))

        self._store.each(read, indices)
        return [found[index] for index in indices]

    def _write_pages(self, job: JobKey) -> None:
        try:
            listing = self._listing(job)
            self._store.delete(listing.replaced)
            first = max(listing.pages, default=-1) + 1
            for number in range(first, max(listing.rows, default=0) // self._page_rows):
                start = number * self._page_rows + 1
                indices = list(range(start, start + self._page_rows))
                self._store.write(_page_key(job, number), b"".join(self._rows(job, indices)))
                self._store.delete(_row_key(job, index) for index in indices)
        except (PlexRLError, FileNotFoundError) as error:
            # Another router has done it, or the next full page is written with this one.
            LOG.info("pages of the metrics of %s were not written: %s", job.job, error)

    def _probe(self) -> None:
        """Warn once if routers could overwrite each other's rows."""
        with self._lock:
            if self._is_probed:
                return
            probe = f"probes/{quote(self._router, safe='')}"
            self._is_conditional = self._store.has_conditional_writes(probe)
            if not self._is_conditional:
                LOG.warning(
                    "%s has no conditional writes (If-None-Match): of rows of metrics that a job "
                    "reports through several routers at one moment, some may be lost",
                    self._store.url,
                )
            self._is_probed = True

    def _listing(self, job: JobKey) -> _Listing:
        return _listing(self._store, job, self._page_rows)


def _listing(store: ObjectStore, job: JobKey, page_rows: int) -> _Listing:
    pages: dict[int, int] = {}
    rows: dict[int, int] = {}
    for each in store.find(_folder(job)):
        folder, _, name = each.key.rpartition("/")
        (pages if folder.endswith("/pages") else rows)[int(name)] = each.nbytes
    replaced = [index for index in rows if (index - 1) // page_rows in pages]
    for index in replaced:
        del rows[index]
    last = max(max(rows, default=0), (max(pages, default=-1) + 1) * page_rows)
    end = _End(last, sum(pages.values()) + sum(rows.values()))
    return _Listing(pages, rows, tuple(_row_key(job, index) for index in replaced), end)


def _folder(job: JobKey) -> str:
    return job.folder("metrics")


def _row_key(job: JobKey, index: int) -> str:
    return f"{_folder(job)}/rows/{index:012d}"


def _page_key(job: JobKey, number: int) -> str:
    return f"{_folder(job)}/pages/{number:09d}"
