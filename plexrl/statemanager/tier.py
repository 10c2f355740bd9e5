"""One tier: a directory of versions, each a data file and the manifest that makes it count.

The same class serves both tiers. The host tier is a directory on a memory file system, so that what
lies there outlives the daemon; the NVMe tier bypasses the page cache, checks digests and is synced
before it is published. Data is written under a temporary name and renamed, the manifest after it: a
version without its manifest does not exist.
"""

import errno
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from plexrl.errors import CorruptStateError, StateTierFullError, StorageError
from plexrl.statemanager.versions import Extent, Manifest, manifest_from_json

LOG = logging.getLogger(__name__)

Bytes = np.ndarray[tuple[Any, ...], np.dtype[np.uint8]]

BLOCK_BYTES = 4 << 20
ALIGNMENT = 4096


class Tier:
    """Versions under one directory. Callers see to it that a version is not read and removed at
    once, and that each is written by one thread."""

    def __init__(self, name: str, directory: Path, *, persistent: bool) -> None:
        self.name = name
        self.directory = directory
        self._persistent = persistent
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def recover(self) -> Iterator[Manifest]:
        """The complete versions found in the directory; what is torn is deleted."""
        complete: set[str] = set()
        for path in sorted(self.directory.glob("*.json")):
            try:
                manifest = manifest_from_json(path.read_bytes())
            except (OSError, msgspec.MsgspecError) as error:
                LOG.warning("%s is no manifest (%s); removed", path, error)
                continue
            try:
                if self._data(manifest).stat().st_size < manifest.nbytes:
                    continue
            except FileNotFoundError:
                continue
            complete |= {path.name, self._data(manifest).name}
            yield manifest
        for path in self.directory.iterdir():
            if path.name not in complete:
                path.unlink()

    def write(self, manifest: Manifest, source: Bytes, extents: Sequence[Extent]) -> Manifest:
        """Store the version: file bytes at `file_offset` come from `source` at `arena_offset`.

        Returns the manifest as stored (with its digest where the tier has one).

        Raises:
            StateTierFullError: the file system has no room; nothing is left behind.
            StorageError: it cannot be written.
        """
        part = self._data(manifest).with_suffix(".part")
        try:
            if self._persistent:
                manifest = self._write_direct(part, manifest, source, extents)
            else:
                self._write_mapped(part, manifest, source, extents)
            part.rename(self._data(manifest))
            self._publish(manifest)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._translate(error) from error
        return manifest

    def map(self, manifest: Manifest) -> Bytes:
        """The version's bytes, read-only, mapped from the file."""
        if manifest.nbytes == 0:
            return np.empty(0, dtype=np.uint8)
        try:
            with self._data(manifest).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise self._corrupt(manifest, str(error)) from error
        if len(mapped) < manifest.nbytes:
            raise self._corrupt(manifest, f"{len(mapped)} of {manifest.nbytes} bytes are there")
        return np.frombuffer(mapped, dtype=np.uint8)[: manifest.nbytes]

    def read(self, manifest: Manifest) -> Bytes:
        """The version's bytes, verified where the tier keeps digests.

        Raises:
            CorruptStateError: bytes are missing or are not those that were written.
        """
        if not self._persistent:
            return self.map(manifest)
        buffer = _aligned(manifest.nbytes)
        try:
            with _open_direct(self._data(manifest), os.O_RDONLY) as fd:
                _read_all(fd, buffer)
        except OSError as error:
            raise self._corrupt(manifest, str(error)) from error
        found = buffer[: manifest.nbytes]
        if digest(found) != manifest.digest:
            raise self._corrupt(manifest, "its digest does not match")
        return found

    def open(self, manifest: Manifest) -> int:
        """A descriptor of the version's file; it stays readable when the version is removed."""
        try:
            return os.open(self._data(manifest), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._corrupt(manifest, str(error)) from error

    def remove(self, manifest: Manifest) -> None:
        """Forget the version; its manifest goes first."""
        self._manifest(manifest).unlink(missing_ok=True)
        self._data(manifest).unlink(missing_ok=True)

    def _write_mapped(
        self, path: Path, manifest: Manifest, source: Bytes, extents: Sequence[Extent]
    ) -> None:
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, manifest.nbytes))
            mapped = mmap.mmap(file.fileno(), 0)
            gather(np.frombuffer(mapped, dtype=np.uint8), source, extents)

    def _write_direct(
        self, path: Path, manifest: Manifest, source: Bytes, extents: Sequence[Extent]
    ) -> Manifest:
        buffer = _aligned(manifest.nbytes)
        gather(buffer, source, extents)
        with _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            for start in range(0, len(buffer), BLOCK_BYTES):
                block = buffer[start : start + BLOCK_BYTES]
                if os.pwrite(fd, block.data, start) != len(block):
                    raise OSError(errno.ENOSPC, "short write")
            os.fsync(fd)
        return manifest.with_digest(digest(buffer[: manifest.nbytes]))

    def _publish(self, manifest: Manifest) -> None:
        target = self._manifest(manifest)
        part = target.with_suffix(".json-part")
        with part.open("wb") as file:
            file.write(manifest.to_json())
            if self._persistent:
                file.flush()
                os.fsync(file.fileno())
        part.rename(target)
        if self._persistent:
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _data(self, manifest: Manifest) -> Path:
        return self.directory / f"{manifest.name}.bin"

    def _manifest(self, manifest: Manifest) -> Path:
        return self.directory / f"{manifest.name}.json"

    def _translate(self, error: OSError) -> StorageError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            return StateTierFullError(
                f"the {self.name} tier {self.directory} has no room on its file system: free space "
                "there or lower the tier's bound; the state stays where it was",
                tier=self.name,
            )
        return StorageError(f"the {self.name} tier {self.directory} cannot be written: {error}")

    def _corrupt(self, manifest: Manifest, why: str) -> CorruptStateError:
        return CorruptStateError(
            f"version {manifest.seq} of {manifest.deployment!r} rank {manifest.rank} in the "
            f"{self.name} tier is damaged ({why}): restore a checkpoint",
            deployment=manifest.deployment,
            seq=manifest.seq,
        )


def gather(target: Bytes, source: Bytes, extents: Sequence[Extent]) -> None:
    """Copy every extent from the arena's layout to the file's."""
    for extent in extents:
        np.copyto(
            target[extent.file_offset : extent.file_offset + extent.nbytes],
            source[extent.arena_offset : extent.arena_offset + extent.nbytes],
        )


def scatter(target: Bytes, source: Bytes, extents: Sequence[Extent]) -> None:
    """Copy every extent from the file's layout to the arena's."""
    for extent in extents:
        np.copyto(
            target[extent.arena_offset : extent.arena_offset + extent.nbytes],
            source[extent.file_offset : extent.file_offset + extent.nbytes],
        )


def digest(data: Bytes) -> str:
    """Hex xxh3-128."""
    return xxhash.xxh3_128_hexdigest(data.data)


class _open_direct:
    """A descriptor that bypasses the page cache where the file system allows it."""

    def __init__(self, path: Path, flags: int) -> None:
        try:
            self._fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _aligned(nbytes: int) -> Bytes:
    """Zeroed memory for direct I/O: page-aligned, a whole number of blocks."""
    size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


def _read_all(fd: int, buffer: Bytes) -> None:
    start = 0
    while start < len(buffer):
        count = os.preadv(fd, [buffer.data[start : start + BLOCK_BYTES]], start)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends after {start} of {len(buffer)} bytes")
        start += count
