"""The host tier's memory, and files beside its segments that workers are lent to write to.

To the segments, such files are other files in their directory: what they take of the bound is set
aside. Those that are idle give way to anything.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plexrl.statemanager.host.free_ranges import Piece
from plexrl.statemanager.host.lent_files import LentFile, LentFiles
from plexrl.statemanager.host.ofd_locks import has_holder
from plexrl.statemanager.host.pool import HostPool
from plexrl.statemanager.transfer.copy.mapped_memory import PAGE_BYTES


class LendingPool(HostPool):
    """Thread-safe, as `HostPool`; a piece may be all of a lent file."""

    def __init__(self, directory: Path, bytes_max: int, **options: Any) -> None:
        """As `HostPool`. Files that are there are idle until `claim` or `claim_held`."""
        self._lent = LentFiles(directory)
        super().__init__(directory, bytes_max, **options)
        for file in self._lent:
            self._numbers = max(self._numbers, file.number + 1)
            self._aside_bytes += file.nbytes
            self._files_bytes += file.nbytes
            self._pin(file)

    @property
    def used_bytes(self) -> int:
        """In use, lent files included, without what was set aside."""
        with self._lock:
            return self._used_bytes + self._lent.nbytes - self._lent.idle_bytes

    @property
    def aside_bytes(self) -> int:
        """Left to other files in the directory than these."""
        with self._lock:
            return self._aside_bytes - self._lent.nbytes

    def claim(self, pieces: Sequence[Piece], tenant: str) -> bool:
        """As `HostPool.claim`."""
        with self._lock:
            if len(pieces) == 1 and pieces[0].segment in self._lent:
                file = self._lent[pieces[0].segment]
                was_idle, file.is_idle = file.is_idle, False
                return was_idle and pieces[0] == file.whole
        return super().claim(pieces, tenant)

    def alloc_apart(self, nbytes: int, owner: str) -> Piece:
        """All of a file of its own, of whole pages. It holds zeros, or what was left in one that
        was last allocated for the same `owner`.

        Raises:
            StateTierFullError: the bound, or the file system, has no room.
        """
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            if not self._has_room(nbytes):
                raise self._full(nbytes, "its bound is reached")
            file = self._lent.take_idle(nbytes, owner)
            if file is not None:
                return file.whole
            self._count(nbytes)
            try:
                if self._on_map is not None:
                    self._make_pinned_way()
                file = self._lent.make(self._numbers, nbytes, owner)
            except OSError as error:
                self._count(-nbytes)
                raise self._full(nbytes, str(error)) from error
            self._numbers += 1
            self._pin(file)
            return file.whole

    def lent(self, piece: Piece) -> LentFile:
        """The file that `alloc_apart` handed out."""
        return self._lent[piece.segment]

    def is_apart(self, piece: Piece) -> bool:
        """Whether `alloc_apart` handed it out."""
        return piece.segment in self._lent

    def find_apart(self, fd: int) -> Piece | None:
        """The file that a descriptor is of, where it is one of `alloc_apart`'s."""
        with self._lock:
            for file in self._lent:
                if os.path.sameopenfile(file.reader, fd):
                    return file.whole
        return None

    def claim_held(self) -> list[Piece]:
        """Count as in use what is free here and held by a process all the same: it was lent by a
        daemon before this one."""
        with self._lock:
            held = [file for file in self._lent if file.is_idle and has_holder(file.reader)]
            for file in held:
                file.is_idle = False
            return [file.whole for file in held]

    def free(self, pieces: Iterable[Piece]) -> None:
        """As `HostPool.free`."""
        others = []
        for piece in pieces:
            if piece.segment not in self._lent:
                others.append(piece)
                continue
            with self._lock:
                gone = self._lent.keep_or_remove(self._lent[piece.segment])
                if gone is not None:
                    self._remove_lent(gone)
        super().free(others)

    def view(self, piece: Piece) -> memoryview:
        """As `HostPool.view`."""
        if piece.segment in self._lent:
            return self._lent[piece.segment].view[piece.offset : piece.offset + piece.nbytes]
        return super().view(piece)

    def address(self, piece: Piece) -> int:
        """As `HostPool.address`."""
        if piece.segment in self._lent:
            return self._lent[piece.segment].address + piece.offset
        return super().address(piece)

    def descriptor(self, segment: int) -> int:
        """As `HostPool.descriptor`."""
        if segment in self._lent:
            return self._lent[segment].reader
        return super().descriptor(segment)

    def close(self) -> None:
        """As `HostPool.close`."""
        super().close()
        for file in self._lent:
            self._unpin(file)
            file.close()

    # The following hold `_lock` already.

    def _has_room(self, nbytes: int) -> bool:
        return super()._has_room(nbytes - self._lent.idle_bytes)

    def _trim(self) -> None:
        while self._used_bytes + self._warm_bytes() + self._aside_bytes > self.bytes_max:
            file = self._lent.first_idle()
            if file is None:
                break
            self._remove_lent(self._lent.forget(file))
        super()._trim()

    def _count(self, nbytes: int) -> None:
        self._files_bytes += nbytes
        self._aside_bytes += nbytes
        # Others' pages make way for those that are new.
        self._trim()

    def _make_pinned_way(self) -> None:
        """Have room for a file whose pages stay. Raises OSError: there is none."""
        excess = self._files_bytes - self.bytes_max
        excess += sum(segment.nbytes for segment in self._segments.values())
        if excess > 0 and excess > self._make_way(excess, ""):
            raise OSError("segments that are pinned are partly in use")

    def _remove_lent(self, file: LentFile) -> None:
        self._files_bytes -= file.nbytes
        self._aside_bytes -= file.nbytes
        self._unpin(file)
        file.remove()
