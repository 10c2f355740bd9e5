"""A segment of the host tier's memory: a sparse file, mapped whole, with a shareable descriptor."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from plexrl.statemanager.bytes.mapped_memory import discard, populate
from plexrl.statemanager.layout.ranges import FreeRanges, Piece
from plexrl.statemanager.store.tiers.host.tier_file import TierFile

SUFFIX = ".segment"


class HostSegment(TierFile):
    """One segment file. Not thread-safe, except for the contents of its memory."""

    def __init__(
        self,
        directory: Path,
        number: int,
        nbytes: int | None = None,
        *,
        memory_nodes: Sequence[int] = (),
    ) -> None:
        """As `TierFile`, sparse."""
        path = directory / f"{number:06d}{SUFFIX}"
        super().__init__(path, number, nbytes, sparse=True, memory_nodes=memory_nodes)
        self.owner: str | None = None
        """Tenant of the segment's current or last contents; absent: none yet."""
        self.shared = nbytes is None
        """Whether another process may have the descriptor. A previous daemon may have shared that
        of an existing file."""
        self.used_bytes = 0
        self.node = memory_nodes[0] if nbytes is not None and len(memory_nodes) == 1 else None
        """Memory node of its pages; absent: unknown, or several."""

    def share_descriptor(self) -> int:
        """The segment's read-only descriptor, which the caller duplicates."""
        self.shared = True
        return self.reader

    def touched(self) -> FreeRanges:
        """Ranges with pages."""
        found = FreeRanges()
        end = 0
        while end < self.nbytes:
            try:
                start = os.lseek(self.reader, end, os.SEEK_DATA)
            except OSError:
                # ENXIO: the rest of the file is a hole.
                break
            end = min(os.lseek(self.reader, start, os.SEEK_HOLE), self.nbytes)
            if start >= self.nbytes:
                break
            found.add(Piece(self.number, start, end - start))
        return found

    def fallocate(self, piece: Piece) -> None:
        """Allocate pages for a range. Raises OSError: the file system is full."""
        with self.path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), piece.offset, piece.nbytes)
        # Mapping page by page on first use takes ten times as long.
        populate(self.address + piece.offset, piece.nbytes)

    def clear(self, piece: Piece) -> None:
        """Fill a range with zeros; keeps its pages."""
        ctypes.memset(self.address + piece.offset, 0, piece.nbytes)

    def discard(self, piece: Piece) -> None:
        """Return a range's pages to the system."""
        discard(self.address + piece.offset, piece.nbytes)

    def remove(self) -> None:
        """Unmap and delete the segment. A process that still has a descriptor reads zeros and keeps
        no memory allocated."""
        self.discard(self.whole)
        super().remove()
