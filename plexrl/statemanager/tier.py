"""One tier: a directory with one file per version.

The same class serves both tiers. The host tier is a directory on a memory file system, so that what
lies there outlives the daemon. The NVMe tier is persistent: it bypasses the page cache, keeps
digests and verifies them, and is synced before a file gets its name.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from plexrl.errors import (
    ConflictError,
    CorruptStateError,
    PlexRLError,
    StateTierFullError,
    StorageError,
)
from plexrl.statemanager.copy import gather, page_aligned_block, scatter, write_all
from plexrl.statemanager.device.memory import DeviceMemory
from plexrl.statemanager.residency import TierName
from plexrl.statemanager.versions import (
    NO_DIGEST,
    PAGE_BYTES,
    Extent,
    Manifest,
    decode_header,
    encode_header,
    padded,
)

LOG = logging.getLogger(__name__)

CACHED_BLOCK_BYTES = 256 << 10
"""Fits the second-level cache beside whatever else the core does."""
DIRECT_BLOCK_BYTES = 4 << 20
"""Saturates one NVMe drive at queue depth 1."""

_SUFFIX = ".version"
_PART_SUFFIX = ".part"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFile:
    """A whole version in a tier."""

    manifest: Manifest
    path: Path
    data_offset: int

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return self.data_offset + padded(self.manifest.nbytes)

    @property
    def data_extent(self) -> tuple[Extent, ...]:
        """The data in one piece, as something to copy from or to."""
        whole = Extent(arena_offset=self.data_offset, file_offset=0, nbytes=self.manifest.nbytes)
        return (whole,) if self.manifest.nbytes else ()


class Tier:
    """Versions under one directory, which one process at a time may use."""

    def __init__(self, name: TierName, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self._persistent = name == TierName.NVME
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            raise ConflictError(
                f"{directory} is in use by another StateManager: give each a directory of its own"
            ) from error

    def close(self) -> None:
        """Let another process use the directory."""
        os.close(self._lock_fd)

    def recover(self) -> Iterator[VersionFile]:
        """The versions in the directory; what was not finished is deleted.

        A version that lost its tail since is kept: loading it says so.
        """
        for path in sorted(self.directory.glob(f"*{_PART_SUFFIX}")):
            path.unlink()
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            try:
                manifest, data_offset = decode_header(_read_header(path))
            except (OSError, CorruptStateError) as error:
                LOG.warning("%s is no version any more (%s); removed", path, error)
                path.unlink(missing_ok=True)
                continue
            yield VersionFile(manifest=manifest, path=path, data_offset=data_offset)

    def plan(self, manifest: Manifest) -> VersionFile:
        """The file that `write` will make of `manifest`; its digest is still open."""
        path = self.directory / f"{manifest.file_name}{_SUFFIX}"
        return VersionFile(manifest=manifest, path=path, data_offset=len(encode_header(manifest)))

    def write(
        self, file: VersionFile, source_fd: int | DeviceMemory, extents: Sequence[Extent]
    ) -> VersionFile:
        """Store a planned version, its data from where `extents` lie in the source.

        Raises:
            StateTierFullError: the file system has no room; nothing is left behind.
            StorageError: it cannot be written; nothing is left behind.
        """

        def fill(fd: int) -> Manifest:
            if not self._persistent:
                block = page_aligned_block(CACHED_BLOCK_BYTES)
                for start, count in gather(source_fd, extents, file.manifest.nbytes, block):
                    write_all(fd, block[:count], file.data_offset + start)
                return file.manifest
            return self._fill_direct(fd, file, source_fd, extents)

        return self._create(file, fill)

    def write_from(
        self, file: VersionFile, tier: "Tier", source: VersionFile, source_fd: int
    ) -> VersionFile:
        """Store a planned version from another tier's file of it, verified there. Raises as both
        `write` and `read` do."""

        def fill(fd: int) -> Manifest:
            tier.read(source, source_fd, fd, file.data_extent)
            return file.manifest

        return self._create(file, fill)

    def take_in(self, file: VersionFile, source_fd: int, source_offset: int) -> VersionFile:
        """Store a planned version from a file that holds its data at `source_offset`: the same
        version in another StateManager's tier, which this one cannot vouch for.

        Raises:
            CorruptStateError: the bytes are not those of the manifest's digest; nothing is left
                behind.
            StateTierFullError: the file system has no room; nothing is left behind.
            StorageError: it cannot be written; nothing is left behind.
        """
        manifest = file.manifest
        source = replace(file, data_offset=source_offset)

        def fill(fd: int) -> Manifest:
            if self._persistent:
                _reserve(fd, file.nbytes)
            digest = xxhash.xxh3_128()
            # The source may bypass the page cache, whatever this tier does.
            block = page_aligned_block(DIRECT_BLOCK_BYTES)
            for start, count in self._blocks(source, source_fd, block):
                digest.update(block[:count])
                end = padded(count)
                block[count:end] = bytes(end - count)
                _write_direct(fd, block[:end], file.data_offset + start)
            if digest.hexdigest() != manifest.digest:
                raise CorruptStateError(
                    f"{manifest.description} arrived damaged (its digest does not match): restore "
                    "a checkpoint",
                    deployment=manifest.deployment,
                    rank=manifest.rank,
                    seq=manifest.seq,
                )
            return manifest

        return self._create(file, fill)

    def digest(self, file: VersionFile, fd: int) -> str:
        """Of a version's data, as its manifest has it or read anew. `fd` is from `open`.

        Raises:
            CorruptStateError: bytes are missing.
        """
        if file.manifest.digest != NO_DIGEST:
            return file.manifest.digest
        digest = xxhash.xxh3_128()
        block = page_aligned_block(CACHED_BLOCK_BYTES)
        for _, count in self._blocks(file, fd, block):
            digest.update(block[:count])
        return digest.hexdigest()

    def read(
        self, file: VersionFile, fd: int, target_fd: int | DeviceMemory, extents: Sequence[Extent]
    ) -> None:
        """Write a version's data to where `extents` lie in the target. `fd` is from `open`.

        Raises:
            CorruptStateError: bytes are missing or not those that were written; the target holds
                some of them.
        """
        manifest = file.manifest
        digest = xxhash.xxh3_128() if self._persistent else None
        block = page_aligned_block(DIRECT_BLOCK_BYTES if self._persistent else CACHED_BLOCK_BYTES)
        starts = [extent.file_offset for extent in extents]
        for start, count in self._blocks(file, fd, block):
            if digest is not None:
                digest.update(block[:count])
            scatter(target_fd, extents, starts, start, block[:count])
        if digest is not None and digest.hexdigest() != manifest.digest:
            raise self._corrupt(manifest, "its digest does not match")

    def open(self, file: VersionFile) -> int:
        """A read-only descriptor of the version's file; good also when the file is removed.

        Raises:
            CorruptStateError: the file is gone.
        """
        try:
            return (_open_direct if self._persistent else _open)(file.path, os.O_RDONLY)
        except OSError as error:
            raise self._corrupt(file.manifest, str(error)) from error

    def remove(self, file: VersionFile) -> None:
        """Delete a version."""
        file.path.unlink(missing_ok=True)

    def _create(self, file: VersionFile, fill: Callable[[int], Manifest]) -> VersionFile:
        part = file.path.with_suffix(_PART_SUFFIX)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            fd = _open_direct(part, flags) if self._persistent else _open(part, flags)
            try:
                manifest = fill(fd)
                _write_header(fd, encode_header(manifest))
                if self._persistent:
                    os.fsync(fd)
            finally:
                os.close(fd)
            part.rename(file.path)
            if self._persistent:
                os.fsync(self._lock_fd)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._refused(error) from error
        except PlexRLError:
            part.unlink(missing_ok=True)
            raise
        return replace(file, manifest=manifest)

    def _fill_direct(
        self, fd: int, file: VersionFile, source_fd: int | DeviceMemory, extents: Sequence[Extent]
    ) -> Manifest:
        manifest = file.manifest
        _reserve(fd, file.nbytes)
        digest = xxhash.xxh3_128()
        block = page_aligned_block(DIRECT_BLOCK_BYTES)
        for start, count in gather(source_fd, extents, manifest.nbytes, block):
            digest.update(block[:count])
            end = padded(count)
            block[count:end] = bytes(end - count)
            _write_direct(fd, block[:end], file.data_offset + start)
        return replace(manifest, digest=digest.hexdigest())

    def _blocks(self, file: VersionFile, fd: int, block: memoryview) -> Iterator[tuple[int, int]]:
        """Bring a version's data into `block`, one block after the other.

        Yields (start in the data, bytes in the block).
        """
        for start in range(0, file.manifest.nbytes, len(block)):
            count = min(len(block), file.manifest.nbytes - start)
            self._read_block(fd, file, start, block[: padded(count)], count)
            yield start, count

    def _read_block(
        self, fd: int, file: VersionFile, start: int, block: memoryview, count: int
    ) -> None:
        """Fill the first `count` bytes of `block` with the data from `start` on."""
        filled = 0
        while filled < count:
            try:
                got = os.preadv(fd, [block[filled:]], file.data_offset + start + filled)
            except OSError as error:
                if error.errno != errno.EINVAL or not _bypasses_cache(fd):
                    raise self._corrupt(file.manifest, str(error)) from error
                _use_cache(fd)
                continue
            if got == 0:
                end = start + filled
                why = f"its data ends after {end} of {file.manifest.nbytes} bytes"
                raise self._corrupt(file.manifest, why)
            filled += got

    def _refused(self, error: OSError) -> StorageError:
        if error.errno in _NO_SPACE:
            return StateTierFullError(
                f"the {self.name} tier {self.directory} has no room on its file system ({error}): "
                "free space there or lower the tier's bound; the state stays where it was",
                tier=self.name.value,
            )
        return StorageError(
            f"the {self.name} tier {self.directory} cannot be written ({error}): mend the file "
            "system; the state stays where it was",
            tier=self.name.value,
        )

    def _corrupt(self, manifest: Manifest, why: str) -> CorruptStateError:
        return CorruptStateError(
            f"{manifest.description} in the {self.name} tier is damaged ({why}): restore a "
            "checkpoint",
            deployment=manifest.deployment,
            rank=manifest.rank,
            seq=manifest.seq,
        )


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(PAGE_BYTES)
        # The header's length stands in its first page.
        length = int.from_bytes(start[8:16], "little")
        return start + file.read(min(length, path.stat().st_size))


def _write_header(fd: int, header: bytes) -> None:
    block = page_aligned_block(len(header))
    block[:] = header
    _write_direct(fd, block, 0)


def _write_direct(fd: int, block: memoryview, offset: int) -> None:
    try:
        write_all(fd, block, offset)
    except OSError as error:
        # Some file systems take O_DIRECT at open and refuse it, or our alignment, later.
        if error.errno != errno.EINVAL or not _bypasses_cache(fd):
            raise
        _use_cache(fd)
        write_all(fd, block, offset)


def _reserve(fd: int, nbytes: int) -> None:
    """Have the file system set the space aside now, where it can."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
            raise


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _open_direct(path: Path, flags: int) -> int:
    """A descriptor that bypasses the page cache, where the file system allows it."""
    try:
        return _open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _open(path, flags)


def _bypasses_cache(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _use_cache(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
