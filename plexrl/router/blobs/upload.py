"""Receives the body of a request: a small one in memory, a large one in a file."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import xxhash

from plexrl.errors import (
    PayloadTooLargeError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from plexrl.process.folders.disk_errors import AWAY, NO_SPACE
from plexrl.wire.framing import MappedFile
from plexrl.wire.tensors import Body

INLINE_BYTES_MAX = 2 << 20
"""A body up to this size is written, checked and split on the event loop, in about a millisecond: a
thread would add more latency."""

FULL_RETRY_S = 1.0
"""Delay before a retry on a full disk."""


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


async def receive(
    chunks: AsyncIterator[bytes], bytes_max: int, new_path: Callable[[], Path]
) -> Upload:
    """Receive a body; a large one is written to a new file while the rest arrives.

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
                file = file or _UploadFile(new_path(), digest)
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


def write_error(folder: Path, error: OSError) -> StorageError:
    """The error to raise if a write below `folder` failed."""
    if error.errno in NO_SPACE:
        return StorageFullError(
            f"the disk of {folder} is full ({error.strerror}): free space there; the same request "
            "succeeds then",
            path=str(folder),
            retry_after_s=FULL_RETRY_S,
        )
    if error.errno in AWAY:
        return StorageUnavailableError(
            f"{folder} cannot be written ({error}): check its disk, mount and owner; the same "
            "request succeeds then",
            retry_after_s=FULL_RETRY_S,
        )
    return StorageError(f"{folder} cannot be written ({error}): check its disk and its owner")


def write_all(fd: int, chunks: Sequence[Body]) -> None:
    """Write all of `chunks`, over as many system calls as it takes. Raises `OSError`."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view.nbytes:
            view = view[os.write(fd, view) :]


def map_file(path: Path) -> memoryview:
    """All bytes of a file that is not empty, memory-mapped. Raises `OSError`."""
    with path.open("rb") as file:
        return memoryview(MappedFile.of(file.fileno()))


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
        try:
            return map_file(self.path)
        except OSError as error:
            raise write_error(self.path.parent, error) from error

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
