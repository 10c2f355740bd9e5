"""The blob store: payloads and results, each a file that is written once and then only read.

A name is published by a rename, so whoever finds a blob finds it whole. Payloads outlive the router
that took them in, which is what lets another one carry the operation out. Large blobs are mapped,
not read: what checks, plans and sends them works on the page cache's own bytes.
"""

import asyncio
import hashlib
import itertools
import logging
import mmap
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import xxhash

from plexrl.errors import (
    NO_SPACE,
    PayloadTooLargeError,
    StorageError,
    StorageFullError,
    UnknownOperationError,
)
from plexrl.ids import BlobRef
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.wire.tensors import Body

LOG = logging.getLogger(__name__)

PAYLOAD_SUFFIX = ".in"
"""Ends the name of every payload."""

RESULT_SUFFIX = ".out"
"""Ends the name of every result."""

INLINE_BYTES_MAX = 2 << 20
"""Up to this size a body is written, checked and split on the event loop, in about a millisecond:
threads would cost an operation's latency more."""

RECENT_BYTES_MAX = 64 << 20
"""Of small payloads, kept in memory until they are first read."""

FULL_RETRY_S = 1.0
"""When a full disk is tried again."""

NAME_BYTES_MAX = 200
"""Of a file's name, of which systems take 255; a longer one is cut and told apart by a digest."""

_NUMBERS = itertools.count()
_PROCESS = uuid.uuid4().hex[:12]
"""Routers of several machines, or of containers with the same process ids, may share a store."""


class Upload:
    """A body that has arrived and has no name yet. `publish` or `drop` it."""

    def __init__(self, body: Body, path: Path | None, digest: str) -> None:
        self.body = body
        """Of a large body a map of its file: it stays valid whatever becomes of the file."""
        self.digest = digest
        """Of its bytes, 32 hexadecimal digits."""
        self.path = path
        """Where a large one lies; absent: in memory alone."""

    def drop(self) -> None:
        """Give the file up; a published one stays."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class BlobStore:
    """Blobs under one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_private_folder(directory)
        self._recent: OrderedDict[BlobRef, Body] = OrderedDict()
        self._recent_bytes = 0

    async def write(self, ref: BlobRef, *parts: Body) -> None:
        """Store a blob, given in parts; the same name again is stored again.

        Raises:
            StorageError: the directory cannot be written.
        """
        if sum(memoryview(part).nbytes for part in parts) <= INLINE_BYTES_MAX:
            self._write(ref, parts)
        else:
            await asyncio.to_thread(self._write, ref, parts)

    async def read(self, ref: BlobRef) -> Body:
        """A blob's bytes, not to be changed.

        Raises:
            UnknownOperationError: it has been discarded.
        """
        if (recent := self._take_recent(ref)) is not None:
            return recent
        path = self._path(ref)
        try:
            if path.stat().st_size <= INLINE_BYTES_MAX:
                return path.read_bytes()
            return _map(path)
        except FileNotFoundError as error:
            raise UnknownOperationError(f"the result {ref!r} is no longer kept") from error

    async def receive(self, chunks: AsyncIterator[bytes], bytes_max: int) -> Upload:
        """Take a body in as it arrives; a large one goes to a file beside what still comes.

        Raises:
            PayloadTooLargeError: it is longer than `bytes_max`; nothing is kept.
            StorageError: the directory cannot be written; nothing is kept.
        """
        digest = xxhash.xxh3_128()
        waiting: list[bytes] = []
        size = waiting_bytes = 0
        arriving: _Arriving | None = None
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > bytes_max:
                    raise PayloadTooLargeError(
                        f"the body is over {bytes_max} bytes: split the batch",
                        body_bytes_max=bytes_max,
                    )
                waiting.append(chunk)
                waiting_bytes += len(chunk)
                if waiting_bytes > INLINE_BYTES_MAX:
                    arriving = arriving or _Arriving(self._part_path("upload"), digest)
                    await arriving.append(waiting)
                    waiting, waiting_bytes = [], 0
            if arriving is None:
                body = b"".join(waiting)
                digest.update(body)
                return Upload(body, None, digest.hexdigest())
            await arriving.append(waiting)
            return Upload(await arriving.finish(), arriving.path, digest.hexdigest())
        except BaseException:
            if arriving is not None:
                await arriving.give_up()
            raise

    async def publish(self, upload: Upload, ref: BlobRef) -> None:
        """Store what has arrived under a name that no other blob ever has. Raises as `write`."""
        if upload.path is None:
            await self.write(ref, upload.body)
            self._keep_recent(ref, upload.body)
            return
        try:
            upload.path.rename(self._path(ref))
        except OSError as error:
            raise unwritable(self._directory, error) from error

    def discard(self, ref: BlobRef) -> None:
        """Give a blob up; one that is gone already is no error."""
        self._take_recent(ref)
        self._path(ref).unlink(missing_ok=True)

    def discard_all(self, refs: Iterable[BlobRef]) -> None:
        """As `discard`; one that cannot be given up is logged and left."""
        for ref in refs:
            try:
                self.discard(ref)
            except OSError as error:
                LOG.error("the blob %s stays: %s", ref, error)

    def payloads(self, *, older_than_s: float) -> list[BlobRef]:
        """Of the payloads stored longer ago than that, those whose files bear their full names."""
        limit = time.time() - older_than_s
        found = []
        for path in sorted(self._directory.glob(f"*{PAYLOAD_SUFFIX}")):
            with suppress(FileNotFoundError):
                if "~" not in path.name and path.stat().st_mtime < limit:
                    found.append(BlobRef(unquote(path.name)))
        return found

    def discard_results(self, *, older_than_s: float) -> None:
        """Give up results that were written longer ago than that, and what a killed router left
        half-written; payloads are the scheduler's."""
        limit = time.time() - older_than_s
        for pattern in (f"*{RESULT_SUFFIX}", "*.part"):
            for path in self._directory.glob(pattern):
                try:
                    if path.stat().st_mtime < limit:
                        path.unlink()
                except FileNotFoundError:
                    # Another router was quicker.
                    continue

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
            with part.open("wb", buffering=0) as file:
                for each in parts:
                    write_all(file.fileno(), [each])
            part.rename(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise unwritable(self._directory, error) from error

    def _part_path(self, name: str) -> Path:
        return self._directory / f"{name[:150]}.{_PROCESS}.{next(_NUMBERS)}.part"

    def _path(self, ref: BlobRef) -> Path:
        return self._directory / _file_name(ref)


class _Arriving:
    """The file of a body of which a part is there. One write at a time is under way, in a thread,
    while the next part arrives."""

    def __init__(self, path: Path, digest: "xxhash.xxh3_128") -> None:
        self.path = path
        self._digest = digest
        self._writing: asyncio.Task[None] | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unwritable(self.path.parent, error) from error

    async def append(self, chunks: list[bytes]) -> None:
        """Add to the file, as soon as the former addition is done."""
        await self._written()
        self._writing = asyncio.create_task(asyncio.to_thread(self._append, chunks))

    async def finish(self) -> Body:
        """All bytes, mapped."""
        await self._written()
        os.close(self._fd)
        self._fd = -1
        return _map(self.path)

    async def give_up(self) -> None:
        """Remove the file. The thread that writes cannot be stopped and is waited for."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._fd >= 0:
            os.close(self._fd)
        self.path.unlink(missing_ok=True)

    async def _written(self) -> None:
        if self._writing is not None:
            # Shielded: a cancelled request must not leave the thread behind with a closed file.
            await asyncio.shield(self._writing)

    def _append(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            self._digest.update(chunk)
        try:
            write_all(self._fd, chunks)
        except OSError as error:
            raise unwritable(self.path.parent, error) from error


def unwritable(where: Path, error: OSError) -> StorageError:
    """What an error of the system while something is written below `where` means to a caller."""
    if error.errno in NO_SPACE:
        return StorageFullError(
            f"the disk of {where} is full ({error.strerror}): free space there; the same request "
            "succeeds then",
            path=str(where),
            retry_after_s=FULL_RETRY_S,
        )
    return StorageError(f"{where} cannot be written ({error}): see its disk and its owner")


def _file_name(ref: BlobRef) -> str:
    name = quote(ref, safe="")
    if len(name) <= NAME_BYTES_MAX:
        return name
    digest = hashlib.blake2b(ref.encode(), digest_size=16).hexdigest()
    # No id has a '~'.
    return f"{name[:120]}~{digest}{Path(ref).suffix}"


def write_all(fd: int, chunks: Sequence[Body]) -> None:
    """Write all of `chunks`, however little the system takes at a time. Raises `OSError`."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view.nbytes:
            view = view[os.write(fd, view) :]


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return memoryview(mapped)
