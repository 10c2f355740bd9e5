"""The blob store: payloads and results as files that are written once and then only read.

A blob is published by a rename, so a reader finds either the whole blob or none. A payload outlives
the router that received it, so another router can execute the operation. Large blobs are
memory-mapped, not read: checks, plans and sends use the page cache's own bytes.
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
"""A body up to this size is written, checked and split on the event loop, in about a millisecond: a
thread would add more latency."""

RECENT_BYTES_MAX = 64 << 20
"""Bound on small payloads kept in memory until they are first read."""

FULL_RETRY_S = 1.0
"""Delay before a retry on a full disk."""

NAME_BYTES_MAX = 200
"""Bound on a file name; file systems allow 255. A longer name is cut, with a digest added."""

_NUMBERS = itertools.count()
_PROCESS = uuid.uuid4().hex[:12]
"""Distinguishes routers that share a store, since process ids repeat across machines."""


class Upload:
    """A body that was received and has no name yet. Call `publish` or `drop`."""

    def __init__(self, body: Body, path: Path | None, digest: str) -> None:
        self.body = body
        """The bytes. A large body is a memory map that stays valid after its file is removed."""
        self.digest = digest
        """Checksum of the bytes, 32 hexadecimal digits."""
        self.path = path
        """File of a large body; absent: the body is only in memory."""

    def drop(self) -> None:
        """Remove the file, unless it was published."""
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
        """Store a blob, given in parts; a blob of the same name is replaced.

        Raises:
            StorageError: the directory cannot be written.
        """
        if sum(memoryview(part).nbytes for part in parts) <= INLINE_BYTES_MAX:
            self._write(ref, parts)
        else:
            await asyncio.to_thread(self._write, ref, parts)

    async def read(self, ref: BlobRef) -> Body:
        """Return a blob's bytes, which must not be changed.

        Raises:
            UnknownOperationError: the blob was discarded.
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
        """Receive a body; a large one is written to a file while the rest arrives.

        Raises:
            PayloadTooLargeError: the body is longer than `bytes_max`; nothing is kept.
            StorageError: the directory cannot be written; nothing is kept.
        """
        digest = xxhash.xxh3_128()
        buffered: list[bytes] = []
        size = buffered_bytes = 0
        file: _UploadFile | None = None
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > bytes_max:
                    raise PayloadTooLargeError(
                        f"the body is over {bytes_max} bytes: split the batch",
                        body_bytes_max=bytes_max,
                    )
                buffered.append(chunk)
                buffered_bytes += len(chunk)
                if buffered_bytes > INLINE_BYTES_MAX:
                    file = file or _UploadFile(self._part_path("upload"), digest)
                    await file.append(buffered)
                    buffered, buffered_bytes = [], 0
            if file is None:
                body = b"".join(buffered)
                digest.update(body)
                return Upload(body, None, digest.hexdigest())
            await file.append(buffered)
            return Upload(await file.finish(), file.path, digest.hexdigest())
        except BaseException:
            if file is not None:
                await file.remove()
            raise

    async def publish(self, upload: Upload, ref: BlobRef) -> None:
        """Store an upload under a name that no other blob ever has. Raises as `write`."""
        if upload.path is None:
            await self.write(ref, upload.body)
            self._keep_recent(ref, upload.body)
            return
        try:
            upload.path.rename(self._path(ref))
        except OSError as error:
            raise write_error(self._directory, error) from error

    def discard(self, ref: BlobRef) -> None:
        """Delete a blob, if it still exists."""
        self._take_recent(ref)
        self._path(ref).unlink(missing_ok=True)

    def discard_all(self, refs: Iterable[BlobRef]) -> None:
        """Delete blobs; one that cannot be deleted is logged and left."""
        for ref in refs:
            try:
                self.discard(ref)
            except OSError as error:
                LOG.error("the blob %s was not deleted: %s", ref, error)

    def payloads(self, *, older_than_s: float) -> list[BlobRef]:
        """Payloads older than `older_than_s` seconds; those with a shortened file name are left
        out."""
        limit = time.time() - older_than_s
        found = []
        for path in sorted(self._directory.glob(f"*{PAYLOAD_SUFFIX}")):
            with suppress(FileNotFoundError):
                if "~" not in path.name and path.stat().st_mtime < limit:
                    found.append(BlobRef(unquote(path.name)))
        return found

    def discard_results(self, *, older_than_s: float) -> None:
        """Delete results older than `older_than_s` seconds, and partial files that a killed router
        left. Payloads are deleted by the scheduler's order."""
        limit = time.time() - older_than_s
        for pattern in (f"*{RESULT_SUFFIX}", "*.part"):
            for path in self._directory.glob(pattern):
                try:
                    if path.stat().st_mtime < limit:
                        path.unlink()
                except FileNotFoundError:
                    # Another router deleted it first.
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
            raise write_error(self._directory, error) from error

    def _part_path(self, name: str) -> Path:
        return self._directory / f"{name[:150]}.{_PROCESS}.{next(_NUMBERS)}.part"

    def _path(self, ref: BlobRef) -> Path:
        return self._directory / _file_name(ref)


class _UploadFile:
    """The file of a large body that is being received. One write at a time runs in a thread while
    the next part arrives."""

    def __init__(self, path: Path, digest: "xxhash.xxh3_128") -> None:
        self.path = path
        self._digest = digest
        self._writing: asyncio.Task[None] | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise write_error(self.path.parent, error) from error

    async def append(self, chunks: list[bytes]) -> None:
        """Append to the file as soon as the previous write is done."""
        await self._wait_for_write()
        self._writing = asyncio.create_task(asyncio.to_thread(self._append, chunks))

    async def finish(self) -> Body:
        """Close the file and return all its bytes, memory-mapped."""
        await self._wait_for_write()
        os.close(self._fd)
        self._fd = -1
        return _map(self.path)

    async def remove(self) -> None:
        """Remove the file, after the write that is running: its thread cannot be stopped."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._fd >= 0:
            os.close(self._fd)
        self.path.unlink(missing_ok=True)

    async def _wait_for_write(self) -> None:
        if self._writing is not None:
            # Shielded: a cancelled request must not close the file under a running thread.
            await asyncio.shield(self._writing)

    def _append(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            self._digest.update(chunk)
        try:
            write_all(self._fd, chunks)
        except OSError as error:
            raise write_error(self.path.parent, error) from error


def write_error(folder: Path, error: OSError) -> StorageError:
    """The error to raise if a write below `folder` failed."""
    if error.errno in NO_SPACE:
        return StorageFullError(
            f"the disk of {folder} is full ({error.strerror}): free space there; the same request "
            "succeeds then",
            path=str(folder),
            retry_after_s=FULL_RETRY_S,
        )
    return StorageError(f"{folder} cannot be written ({error}): check its disk and its owner")


def _file_name(ref: BlobRef) -> str:
    name = quote(ref, safe="")
    if len(name) <= NAME_BYTES_MAX:
        return name
    digest = hashlib.blake2b(ref.encode(), digest_size=16).hexdigest()
    # No id contains a '~'.
    return f"{name[:120]}~{digest}{Path(ref).suffix}"


def write_all(fd: int, chunks: Sequence[Body]) -> None:
    """Write all of `chunks`, over as many system calls as it takes. Raises `OSError`."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view.nbytes:
            view = view[os.write(fd, view) :]


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return memoryview(mapped)
