"""Objects on NVMe: one file each, with direct I/O and a digest per block.

    magic | u64 bytes of JSON | u64 xxh3 of JSON | id, size, digests | zeros up to a page | data

The data is padded with zeros to a page. There is one digest per `BLOCK_BYTES` of data; the last
block may be shorter. A file is written under a temporary name, synced, and renamed when it is
complete.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Event

import msgspec
import xxhash

from plexrl.errors import CorruptStateError, PlexRLError
from plexrl.process.folders.durable_files import rename_durably
from plexrl.statemanager.bytes.data_plane import BLOCK_BYTES, DataPlane
from plexrl.statemanager.bytes.direct_io import open_direct, reserve, transfer
from plexrl.statemanager.layout.versions import decode_page, encode_page, padded
from plexrl.statemanager.store.tiers.tier import PART_SUFFIX, Tier

MAGIC = b"PLEXRLO1"
DIGEST_BYTES = 16

_SUFFIX = ".object"

Views = Sequence[memoryview]

BlockSource = Callable[[int, int], AbstractContextManager[Views]]
"""Takes an offset and a size; returns those bytes of an object's data, in memory that direct I/O
accepts: page aligned and in whole pages, the last page padded with zeros."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    id: str
    nbytes: int
    digests: bytes


class NvmeObjects:
    """The object files of the NVMe tier. Thread-safe, except for two concurrent moves of one
    object."""

    def __init__(self, tier: Tier, plane: DataPlane) -> None:
        self._tier = tier
        self._plane = plane

    def ids(self) -> Iterator[str]:
        """Ids of all objects in the tier."""
        for path in self._tier.directory.glob(f"*{_SUFFIX}"):
            yield path.name.removesuffix(_SUFFIX)

    def write(
        self, object_id: str, nbytes: int, source: BlockSource, cancelled: Event | None = None
    ) -> bytes:
        """Store an object; returns its digests.

        Raises:
            StateTierFullError: the file system is full; nothing is left behind.
            StorageError: the file cannot be written; nothing is left behind.
            OperationCancelledError: `cancelled` was set; nothing is left behind.
        """
        part = self._path(object_id).with_suffix(PART_SUFFIX)
        digests = bytearray(digests_bytes(nbytes))
        data_start = data_offset(object_id, nbytes)

        def write_block(fd: int, start: int) -> None:
            count = min(BLOCK_BYTES, nbytes - start)
            with source(start, count) as views:
                at = start // BLOCK_BYTES * DIGEST_BYTES
                digests[at : at + DIGEST_BYTES] = digest(views, count)
                transfer(os.pwritev, fd, views, data_start + start)
            self._tier.faults.reach("spill.block")

        try:
            fd = open_direct(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                reserve(fd, data_start + padded(nbytes))
                starts = range(0, nbytes, BLOCK_BYTES)
                self._plane.pipeline((partial(write_block, fd, at) for at in starts), cancelled)
                self._tier.faults.reach("spill.data")
                header = _Header(object_id, nbytes, bytes(digests))
                with self._plane.buffer() as buffer:
                    _write_header(fd, _encode(header), buffer.view)
                os.fsync(fd)
            finally:
                os.close(fd)
            rename_durably(part, self._path(object_id))
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._tier.write_error(error) from error
        except PlexRLError:
            part.unlink(missing_ok=True)
            raise
        self._tier.faults.reach("spill.rename")
        return bytes(digests)

    @contextmanager
    def reading(self, object_id: str, nbytes: int) -> Iterator["NvmeReader"]:
        """Open an object's file for verified reads.

        Raises:
            CorruptStateError: the file is missing or its header is damaged.
        """
        try:
            fd = self.open(object_id)
            try:
                yield NvmeReader(fd, _read_header(fd, object_id, nbytes))
            finally:
                os.close(fd)
        except OSError as error:
            raise damaged(object_id, str(error)) from error

    def open(self, object_id: str) -> int:
        """A read-only descriptor of an object's file. Raises OSError."""
        return open_direct(self._path(object_id), os.O_RDONLY)

    def remove(self, object_id: str) -> None:
        """Delete an object's file."""
        self._path(object_id).unlink(missing_ok=True)
        self._tier.faults.reach("drop.object")

    def _path(self, object_id: str) -> Path:
        return self._tier.directory / f"{object_id}{_SUFFIX}"


class NvmeReader:
    """Reads an object's blocks and verifies the digest of each."""

    def __init__(self, fd: int, header: _Header) -> None:
        self.digests = header.digests
        self._fd = fd
        self._header = header
        self._data_start = data_offset(header.id, header.nbytes)

    def read_block(self, start: int, views: Views) -> int:
        """Read the block at offset `start` into `views` (whole pages); returns its size.

        Raises:
            CorruptStateError: the block is damaged; the message names the block.
        """
        count = min(BLOCK_BYTES, self._header.nbytes - start)
        block = start // BLOCK_BYTES
        try:
            got = transfer(os.preadv, self._fd, views, self._data_start + start)
        except OSError as error:
            raise damaged(self._header.id, f"block {block}: {error}") from error
        if got < count:
            why = f"its data ends after {start + got} of {self._header.nbytes} bytes"
            raise damaged(self._header.id, why)
        at = block * DIGEST_BYTES
        if digest(views, count) != self.digests[at : at + DIGEST_BYTES]:
            raise damaged(self._header.id, f"the digest does not match in block {block}")
        return count


def file_bytes(object_id: str, nbytes: int) -> int:
    """Size of an object's file."""
    return data_offset(object_id, nbytes) + padded(nbytes)


def digests_bytes(nbytes: int) -> int:
    """Size of the digests of `nbytes` of data."""
    return -(-nbytes // BLOCK_BYTES) * DIGEST_BYTES


def digest(views: Views, nbytes: int) -> bytes:
    """xxh3-128 of the first `nbytes` bytes of a block."""
    made = xxhash.xxh3_128()
    for view in views:
        made.update(view[:nbytes])
        nbytes -= min(len(view), nbytes)
    return made.digest()


def damaged(object_id: str, why: str) -> CorruptStateError:
    """The error for a damaged object on NVMe; the caller adds the version's name."""
    return CorruptStateError(f"object {object_id} in the nvme tier is damaged: {why}")


def data_offset(object_id: str, nbytes: int) -> int:
    """Offset of an object's data in its file."""
    return len(_encode(_Header(object_id, nbytes, bytes(digests_bytes(nbytes)))))


def _encode(header: _Header) -> bytes:
    return encode_page(MAGIC, msgspec.json.encode(header))


def _read_header(fd: int, object_id: str, nbytes: int) -> _Header:
    # The expected contents determine the length, so a damaged length is never used.
    page = mmap.mmap(-1, data_offset(object_id, nbytes))
    transfer(os.preadv, fd, [memoryview(page)], 0)
    try:
        header = msgspec.json.decode(decode_page(MAGIC, page[:]), type=_Header)
    except (msgspec.MsgspecError, CorruptStateError) as error:
        raise damaged(object_id, str(error)) from error
    if (header.id, header.nbytes, len(header.digests)) != (
        object_id,
        nbytes,
        digests_bytes(nbytes),
    ):
        raise damaged(object_id, "the file belongs to another object")
    return header


def _write_header(fd: int, header: bytes, buffer: memoryview) -> None:
    for start in range(0, len(header), len(buffer)):
        chunk = header[start : start + len(buffer)]
        buffer[: len(chunk)] = chunk
        transfer(os.pwritev, fd, [buffer[: len(chunk)]], start)
