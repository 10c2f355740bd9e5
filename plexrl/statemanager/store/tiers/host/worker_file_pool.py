"""The host tier's memory pool, extended by files that are allocated whole to workers.

The segments' accounts count worker files as other files in the directory. Idle worker files are
evicted before segments.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plexrl.statemanager.layout.ranges import PAGE_BYTES, Piece
from plexrl.statemanager.store.tiers.host.ofd_locks import has_holder
from plexrl.statemanager.store.tiers.host.prefault.prefaulted_pool import PrefaultedPool
from plexrl.statemanager.store.tiers.host.worker_files import WorkerFile, WorkerFiles


class WorkerFilePool(PrefaultedPool):
    """As `HostPool`, and a piece may be a whole worker file. Thread-safe."""

    def __init__(self, directory: Path, bytes_max: int, **options: Any) -> None:
        """As `HostPool`. Existing files are idle until `claim` or `claim_held_files`."""
        self._worker_files = WorkerFiles(directory, options.get("memory_nodes", ()))
        super().__init__(directory, bytes_max, **options)
        for file in self._worker_files:
            self._numbers = max(self._numbers, file.number + 1)
            self._other_bytes += file.nbytes
            self._files_bytes += file.nbytes
            if self._on_map is not None:
                self._unpinned.append(file)

    @property
    def used_bytes(self) -> int:
        """Bytes in use, including allocated worker files, without other files."""
        with self._lock:
            return self._used_bytes + self._worker_files.nbytes - self._worker_files.idle_bytes

    @property
    def other_bytes(self) -> int:
        """Bytes of the capacity that other files in the directory use, without worker files."""
        with self._lock:
            return self._other_bytes - self._worker_files.nbytes

    def claim(self, pieces: Sequence[Piece], tenant: str) -> bool:
        with self._lock:
            if len(pieces) == 1 and pieces[0].segment in self._worker_files:
                file = self._worker_files[pieces[0].segment]
                was_idle, file.is_idle = file.is_idle, False
                return was_idle and pieces[0] == file.whole
        return super().claim(pieces, tenant)

    def alloc_file(self, nbytes: int, owner: str, near: int | None = None) -> Piece:
        """Allocate a whole file, rounded up to pages, on the memory node `near`. It holds zeros, or
        what the same `owner` left in it.

        Raises:
            StateTierFullError: the capacity is reached or the file system is full.
        """
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        nodes = self._nodes_near(near)
        with self._lock:
            self._await_space(nbytes, None)
            if not self._fits(nbytes):
                raise self._full(nbytes, "its capacity is reached")
            file = self._worker_files.take_idle(nbytes, owner, nodes)
            if file is not None:
                return file.whole
            self._count(nbytes)
            try:
                if self._on_map is not None:
                    self._evict_pinned_segments()
                file = self._worker_files.make(self._numbers, nbytes, owner, nodes)
            except OSError as error:
                self._count(-nbytes)
                raise self._full(nbytes, str(error)) from error
            self._numbers += 1
            self._pin(file)
            return file.whole

    def file(self, piece: Piece) -> WorkerFile:
        """The file of a piece from `alloc_file`."""
        return self._worker_files[piece.segment]

    def is_file(self, piece: Piece) -> bool:
        """Whether the piece is a whole worker file."""
        return piece.segment in self._worker_files

    def find_file(self, fd: int) -> Piece | None:
        """The worker file that `fd` refers to; None if it is not one."""
        with self._lock:
            for file in self._worker_files:
                if os.path.sameopenfile(file.reader, fd):
                    return file.whole
        return None

    def claim_held_files(self) -> list[Piece]:
        """Claim idle files that a process still holds: a previous daemon allocated them."""
        with self._lock:
            held = [file for file in self._worker_files if file.is_idle and has_holder(file.reader)]
            for file in held:
                file.is_idle = False
            return [file.whole for file in held]

    def free(self, pieces: Iterable[Piece]) -> None:
        others = []
        for piece in pieces:
            if piece.segment not in self._worker_files:
                others.append(piece)
                continue
            with self._lock:
                gone = self._worker_files.keep_or_remove(self._worker_files[piece.segment])
                if gone is not None:
                    self._remove_file(gone)
        super().free(others)

    def view(self, piece: Piece) -> memoryview:
        if piece.segment in self._worker_files:
            return self._worker_files[piece.segment].view[
                piece.offset : piece.offset + piece.nbytes
            ]
        return super().view(piece)

    def address(self, piece: Piece) -> int:
        if piece.segment in self._worker_files:
            return self._worker_files[piece.segment].address + piece.offset
        return super().address(piece)

    def descriptor(self, segment: int) -> int:
        if segment in self._worker_files:
            return self._worker_files[segment].reader
        return super().descriptor(segment)

    def close(self) -> None:
        super().close()
        for file in self._worker_files:
            self._unpin(file)
            file.close()

    # The caller holds `_lock` in the following methods.

    def _fits(self, nbytes: int) -> bool:
        return super()._fits(nbytes - self._worker_files.idle_bytes)

    def _trim(self) -> None:
        while self._used_bytes + self._warm_bytes() + self._other_bytes > self.bytes_max:
            file = self._worker_files.first_idle()
            if file is None:
                break
            self._remove_file(self._worker_files.forget(file))
        super()._trim()

    def _remove_idle_files(self, nbytes: int) -> int:
        removed = 0
        while removed < nbytes and (file := self._worker_files.first_idle()) is not None:
            self._remove_file(self._worker_files.forget(file))
            removed += file.nbytes
        return removed

    def _count(self, nbytes: int) -> None:
        self._files_bytes += nbytes
        self._other_bytes += nbytes
        # Free pages beyond the capacity are returned.
        self._trim()

    def _evict_pinned_segments(self) -> None:
        """Free pinned segments for a new file. Raises OSError: not enough are idle."""
        excess = self._mapped_bytes() - self.bytes_max
        if excess > 0 and excess > self._remove_idle_segments(excess, ()):
            raise OSError("pinned segments are partly in use")

    def _remove_file(self, file: WorkerFile) -> None:
        self._files_bytes -= file.nbytes
        self._other_bytes -= file.nbytes
        self._unpin(file)
        file.remove()
