"""Host-tier files that are allocated whole to one worker at a time, outside the segments.

The worker may write to its file. A version may take the file over as an object. A worker's
descriptor gives access to nothing but its own file.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from plexrl.statemanager.layout.ranges import PAGE_BYTES
from plexrl.statemanager.store.tiers.host.ofd_locks import has_holder
from plexrl.statemanager.store.tiers.host.tier_file import TierFile

SUFFIX = ".lent"


class WorkerFile(TierFile):
    """One file, also mapped in the daemon, which accesses it only while no worker can write to
    it."""

    def __init__(
        self,
        directory: Path,
        number: int,
        nbytes: int | None = None,
        *,
        memory_nodes: Sequence[int] = (),
    ) -> None:
        """As `TierFile`, with all its pages."""
        path = directory / f"{number:06d}{SUFFIX}"
        super().__init__(path, number, nbytes, memory_nodes=memory_nodes)
        self.memory_nodes = tuple(memory_nodes)
        """Where its pages are; of an existing file this is a guess."""
        self.owner = ""
        """Last owner; empty if unknown."""
        self.is_idle = nbytes is None

    def is_intact(self) -> bool:
        """Whether the file has all its pages; a worker could have truncated it."""
        found = os.fstat(self.reader)
        return found.st_size == self.nbytes and found.st_blocks * 512 >= self.nbytes


class WorkerFiles:
    """All worker files of a host tier, by number. Not thread-safe."""

    def __init__(self, directory: Path, memory_nodes: Sequence[int]) -> None:
        """Open the existing files; all are idle, and count as being on `memory_nodes`."""
        self._directory = directory
        self._files: dict[int, WorkerFile] = {}
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            if not path.stat().st_size or path.stat().st_size % PAGE_BYTES:
                # A worker truncated the file, or its creation was interrupted.
                path.unlink()
                continue
            number = int(path.name.removesuffix(SUFFIX))
            self._files[number] = WorkerFile(directory, number, memory_nodes=memory_nodes)

    def __contains__(self, number: int) -> bool:
        return number in self._files

    def __getitem__(self, number: int) -> WorkerFile:
        return self._files[number]

    def __iter__(self) -> Iterator[WorkerFile]:
        return iter(list(self._files.values()))

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle files, which are kept for the next allocation."""
        return sum(file.nbytes for file in self._files.values() if file.is_idle)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self._files.values())

    def take_idle(self, nbytes: int, owner: str, memory_nodes: Sequence[int]) -> WorkerFile | None:
        """An idle file of exactly this size on these memory nodes, with zeros or the contents that
        `owner` left; None if there is none."""
        found = [file for file in self._files.values() if file.is_idle and file.nbytes == nbytes]
        found = [file for file in found if file.memory_nodes == tuple(memory_nodes)]
        if not found:
            return None
        # A file of the same owner need not be cleared.
        file = min(found, key=lambda one: (one.owner != owner, one.number))
        if file.owner != owner:
            ctypes.memset(file.address, 0, file.nbytes)
        file.is_idle, file.owner = False, owner
        return file

    def make(self, number: int, nbytes: int, owner: str, memory_nodes: Sequence[int]) -> WorkerFile:
        """Create a file on memory nodes. Raises OSError: the file system is full."""
        file = WorkerFile(self._directory, number, nbytes, memory_nodes=memory_nodes)
        self._files[number] = file
        file.owner = owner
        return file

    def keep_or_remove(self, file: WorkerFile) -> WorkerFile | None:
        """Mark a freed file as idle. Returns the file if it must be removed instead, because a
        process still holds it or truncated it."""
        if has_holder(file.reader) or not file.is_intact():
            return self.forget(file)
        file.is_idle = True
        return None

    def forget(self, file: WorkerFile) -> WorkerFile:
        """Stop tracking a file; the caller removes it."""
        return self._files.pop(file.number)

    def first_idle(self) -> WorkerFile | None:
        """The first idle file; None if there is none."""
        return next((file for file in self._files.values() if file.is_idle), None)
