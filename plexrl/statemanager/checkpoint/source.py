"""Versions as a checkpoint reads them, wherever they lie."""

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import xxhash

from plexrl.errors import CorruptStateError
from plexrl.statemanager.keys import StateSlice
from plexrl.statemanager.versions import NO_DIGEST, Manifest, slices_in_file

VERIFY_BLOCK_BYTES = 1 << 20


class VersionReader(Protocol):
    """One rank's version, which stays as it is while it is read."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def slices(self) -> Sequence[StateSlice]:
        """`arena_offset` counts in the data."""
        ...

    def read_data(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the data from `start` on.

        Raises:
            CorruptStateError: bytes are missing.
        """
        ...

    def confirm(self) -> None:
        """Return if what was read so far is the version.

        Raises:
            UnavailableError: whoever holds the version in place is gone.
        """
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class FileReader:
    """A version in a file of its own, this daemon's or another's on this machine."""

    def __init__(self, manifest: Manifest, fd: int, data_offset: int) -> None:
        """The descriptor stays the caller's."""
        self.manifest = manifest
        # A new open file: this one may bypass the page cache and ask for aligned reads.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._data_offset = data_offset
        self._verified = manifest.digest == NO_DIGEST

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `VersionReader.slices`; made when first asked for, since pinning must not wait."""
        return slices_in_file(self.manifest, 0)

    def read_data(self, start: int, buffer: memoryview) -> None:
        """As `VersionReader.read_data`."""
        self._verify()
        self._read(start, buffer)

    def _verify(self) -> None:
        """What has left memory is checked against its digest once, as a load would."""
        if self._verified:
            return
        digest = xxhash.xxh3_128()
        block = memoryview(bytearray(VERIFY_BLOCK_BYTES))
        for start in range(0, self.manifest.nbytes, len(block)):
            part = block[: min(len(block), self.manifest.nbytes - start)]
            self._read(start, part)
            digest.update(part)
        if digest.hexdigest() != self.manifest.digest:
            raise self._damaged("its digest does not match")
        self._verified = True

    def _read(self, start: int, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            at = self._data_offset + start + filled
            try:
                got = os.preadv(self._fd, [buffer[filled:]], at)
            except OSError as error:
                raise self._damaged(str(error)) from error
            if got == 0:
                raise self._damaged(f"it ends at byte {at}")
            filled += got

    def confirm(self) -> None:
        """As `VersionReader.confirm`; an open file keeps its bytes whatever becomes of its name."""

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def _damaged(self, why: str) -> CorruptStateError:
        return CorruptStateError(
            f"{self.manifest.description} cannot be read for its checkpoint ({why}): save it again"
        )
