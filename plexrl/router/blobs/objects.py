"""A blob store in an object store, for routers on several machines.

    payloads/<name>     results/<name>

A blob is one object, written as a whole. A large blob passes through a file of the local cache, so
that a router which has stored or read a blob does not read it again.
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import xxhash

from plexrl.errors import PayloadLostError, PlexRLError
from plexrl.ids import BlobRef
from plexrl.router.blobs.checked_file import read_checked
from plexrl.router.blobs.local_cache import LocalCache
from plexrl.router.blobs.store import PAYLOAD_SUFFIX, blob_name, check_digest, missing
from plexrl.router.blobs.upload import (
    INLINE_BYTES_MAX,
    Upload,
    receive,
    write_all,
    write_error,
)
from plexrl.storage.object_store import ObjectStore
from plexrl.wire.tensors import Body

LOG = logging.getLogger(__name__)

Result = TypeVar("Result")

TRANSFERS_MAX = 32
"""Blobs that are written and read at a time."""
DISCARDS_MAX = 100_000
"""Blobs that wait to be deleted; more are left to garbage collection."""
PAYLOADS, RESULTS = "payloads", "results"


class ObjectBlobStore:
    """Blobs below one URL."""

    result_period_s = 600.0

    def __init__(self, store: ObjectStore, cache: LocalCache) -> None:
        self._store = store
        self._cache = cache
        self._threads = ThreadPoolExecutor(TRANSFERS_MAX, thread_name_prefix="blobs")
        self._reading: dict[BlobRef, asyncio.Task[Body]] = {}
        self._discards: deque[BlobRef] = deque()
        self._has_discards = threading.Event()
        self._is_closing = False
        self._discarding = threading.Thread(target=self._discard_objects, daemon=True)
        self._discarding.start()

    async def write(self, ref: BlobRef, *parts: Body) -> None:
        if sum(memoryview(part).nbytes for part in parts) <= INLINE_BYTES_MAX:
            body = b"".join(parts)
            await self._in_thread(lambda: self._store.write(_key(ref), body))
            self._cache.keep(ref, body)
            return

        def write_large() -> None:
            path = self._cache.new_path()
            try:
                _write_file(path, parts)
                self._store.write_file(_key(ref), path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            self._cache.keep_file(ref, path)

        await self._in_thread(write_large)

    async def read(self, ref: BlobRef) -> Body:
        if (found := self._cache.read(ref)) is not None:
            return found
        if (path := self._cache.file(ref)) is not None:
            try:
                return await self._in_thread(lambda: read_checked(ref, path))
            except (PayloadLostError, OSError) as error:
                LOG.info("the copy of %s is fetched again: %s", ref, error)
                self._cache.discard(ref)
        task = self._reading.get(ref)
        if task is None:
            task = asyncio.create_task(self._in_thread(lambda: self._fetch(ref)))
            self._reading[ref] = task
            task.add_done_callback(lambda _: self._reading.pop(ref, None))
        # Shielded: other requests may wait for the same blob.
        return await asyncio.shield(task)

    async def receive(self, chunks: AsyncIterator[bytes], bytes_max: int) -> Upload:
        return await receive(chunks, bytes_max, self._cache.new_path)

    async def publish(self, upload: Upload, ref: BlobRef) -> None:
        if upload.path is None:
            await self.write(ref, upload.body)
            return
        # A path of its own: the request removes the upload's, also if it is cancelled meanwhile.
        path = self._cache.new_path()
        upload.path.rename(path)

        def write_large() -> None:
            try:
                self._store.write_file(_key(ref), path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            self._cache.keep_file(ref, path)

        await self._in_thread(write_large)

    def discard(self, ref: BlobRef) -> None:
        """The object is deleted in the background; if that fails, by garbage collection."""
        self._cache.discard(ref)
        if len(self._discards) < DISCARDS_MAX:
            self._discards.append(ref)
            self._has_discards.set()

    def discard_all(self, refs: Iterable[BlobRef]) -> None:
        for ref in refs:
            self.discard(ref)

    def payloads(self, *, older_than_s: float) -> list[BlobRef]:
        limit = time.time() - older_than_s
        return [
            BlobRef(unquote(found.key.rpartition("/")[2]))
            for found in self._store.find(PAYLOADS)
            if found.modified_s < limit and "~" not in found.key
        ]

    def discard_results(self, *, older_than_s: float) -> None:
        limit = time.time() - older_than_s
        found = self._store.find(RESULTS)
        self._store.delete(each.key for each in found if each.modified_s < limit)

    def close(self) -> None:
        """Stop the deletion of discarded blobs; garbage collection deletes the rest."""
        self._is_closing = True
        self._has_discards.set()
        self._discarding.join()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _fetch(self, ref: BlobRef) -> Body:
        key = _key(ref)
        try:
            size = self._store.size(key)
            if size <= INLINE_BYTES_MAX:
                body = self._store.read(key)
                check_digest(ref, xxhash.xxh3_128_hexdigest(body))
                self._cache.keep(ref, body)
                return body
            return self._fetch_large(ref, key, size)
        except FileNotFoundError as error:
            raise missing(ref) from error

    def _fetch_large(self, ref: BlobRef, key: str, size: int) -> Body:
        path = self._cache.new_path()
        try:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise write_error(self._cache.folder, error) from error

            def take(_: str, start: int, data: bytes) -> None:
                try:
                    os.pwrite(fd, data, start)
                except OSError as error:
                    raise write_error(self._cache.folder, error) from error

            try:
                self._store.read_ranges([(key, 0, size)], take)
            finally:
                os.close(fd)
            body = read_checked(ref, path)
            self._cache.keep_file(ref, path)
            return body
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _discard_objects(self) -> None:
        while not self._is_closing:
            self._has_discards.wait()
            self._has_discards.clear()
            while self._discards and not self._is_closing:
                refs = [self._discards.popleft() for _ in range(min(1000, len(self._discards)))]
                try:
                    self._store.delete(_key(ref) for ref in refs)
                except PlexRLError as error:
                    LOG.error("%d blobs were not deleted: %s", len(refs), error)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _key(ref: BlobRef) -> str:
    folder = PAYLOADS if ref.endswith(PAYLOAD_SUFFIX) else RESULTS
    return f"{folder}/{blob_name(ref)}"


def _write_file(path: Path, parts: Iterable[Body]) -> None:
    try:
        with path.open("xb", buffering=0) as file:
            write_all(file.fileno(), list(parts))
    except OSError as error:
        raise write_error(path.parent, error) from error
