"""A blob store in a directory of this machine or on a mount that all routers share.

A blob is flushed before it gets its name, and its name before `write` or `publish` returns. Many
blobs are flushed at the same time in threads, so that the file system commits them together; their
names are flushed by one flush of the folder.
"""

import asyncio
import itertools
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import xxhash

from plexrl.ids import BlobRef
from plexrl.process.folders.durable_files import FolderFlush, create_durably, flush
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.router.blobs.checked_file import read_checked
from plexrl.router.blobs.store import (
    PAYLOAD_SUFFIX,
    RECENT_BYTES_MAX,
    RESULT_SUFFIX,
    blob_name,
    check_digest,
    lost,
    missing,
)
from plexrl.router.blobs.upload import (
    INLINE_BYTES_MAX,
    Upload,
    receive,
    write_error,
)
from plexrl.wire.tensors import Body

LOG = logging.getLogger(__name__)

Result = TypeVar("Result")

FLUSHES_MAX = 16
"""Blobs that are written and flushed at a time."""

_NUMBERS = itertools.count()
_PROCESS = uuid.uuid4().hex[:12]
"""Distinguishes routers that share a store, since process ids repeat across machines."""


class DirectoryBlobStore:
    """Blobs under one directory; each is published by a rename."""

    result_period_s = 60.0

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_private_folder(directory)
        self._names = FolderFlush(directory)
        self._threads = ThreadPoolExecutor(FLUSHES_MAX, thread_name_prefix="blobs")
        self._recent: OrderedDict[BlobRef, Body] = OrderedDict()
        self._recent_bytes = 0

    async def write(self, ref: BlobRef, *parts: Body) -> None:
        await self._in_thread(partial(self._write, ref, parts))

    async def read(self, ref: BlobRef) -> Body:
        if (recent := self._take_recent(ref)) is not None:
            return recent
        path = self._path(ref)
        try:
            if path.stat().st_size <= INLINE_BYTES_MAX:
                body = path.read_bytes()
                check_digest(ref, xxhash.xxh3_128_hexdigest(body))
                return body
            return await self._in_thread(partial(read_checked, ref, path))
        except FileNotFoundError as error:
            raise missing(ref) from error
        except OSError as error:
            raise lost(ref, str(error)) from error

    async def receive(self, chunks: AsyncIterator[bytes], bytes_max: int) -> Upload:
        return await receive(chunks, bytes_max, lambda: self._part_path("upload"))

    async def publish(self, upload: Upload, ref: BlobRef) -> None:
        if upload.path is None:
            await self.write(ref, upload.body)
            self._keep_recent(ref, upload.body)
            return
        await self._in_thread(partial(self._publish, upload.path, ref))

    def discard(self, ref: BlobRef) -> None:
        self._take_recent(ref)
        self._path(ref).unlink(missing_ok=True)

    def discard_all(self, refs: Iterable[BlobRef]) -> None:
        for ref in refs:
            try:
                self.discard(ref)
            except OSError as error:
                LOG.error("the blob %s was not deleted: %s", ref, error)

    def payloads(self, *, older_than_s: float) -> list[BlobRef]:
        limit = self._now() - older_than_s
        found = []
        for path in sorted(self._directory.glob(f"*{PAYLOAD_SUFFIX}")):
            with suppress(FileNotFoundError):
                if "~" not in path.name and path.stat().st_mtime < limit:
                    found.append(BlobRef(unquote(path.name)))
        return found

    def discard_results(self, *, older_than_s: float) -> None:
        """Delete results older than `older_than_s` seconds, and partial files that a killed router
        left. Payloads are deleted by the scheduler's order."""
        limit = self._now() - older_than_s
        for pattern in (f"*{RESULT_SUFFIX}", "*.part"):
            for path in self._directory.glob(pattern):
                try:
                    if path.stat().st_mtime < limit:
                        path.unlink()
                except FileNotFoundError:
                    # Another router deleted it first.
                    continue

    def _now(self) -> float:
        """The clock of the file system, which on a mount is another machine's."""
        os.utime(self._directory)
        return self._directory.stat().st_mtime

    def close(self) -> None:
        """Begin no more writes."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _keep_recent(self, ref: BlobRef, body: Body) -> None:
        self._take_recent(ref)
        self._recent[ref] = body
        self._recent_bytes += len(body)
        while self._recent_bytes > RECENT_BYTES_MAX:
            self._take_recent(next(iter(self._recent)))

    def _take_recent(self, ref: BlobRef) -> Body | None:
        body = self._recent.pop(ref, None)
        if body is not None:
            self._recent_bytes -= len(body)
        return body

    def _write(self, ref: BlobRef, parts: Sequence[Body]) -> None:
        path = self._path(ref)
        part = self._part_path(path.name)
        try:
            create_durably(part, *parts)
            part.rename(path)
            self._names.flush()
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise write_error(self._directory, error) from error

    def _publish(self, part: Path, ref: BlobRef) -> None:
        try:
            flush(part)
            part.rename(self._path(ref))
            self._names.flush()
        except OSError as error:
            raise write_error(self._directory, error) from error

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _part_path(self, name: str) -> Path:
        return self._directory / f"{name[:150]}.{_PROCESS}.{next(_NUMBERS)}.part"

    def _path(self, ref: BlobRef) -> Path:
        return self._directory / blob_name(ref)
