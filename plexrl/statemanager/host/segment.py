"""A segment of the host tier's memory: a sparse file, mapped whole, with a shareable descriptor."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from plexrl.statemanager.host.free_ranges import FreeRanges, Piece
from plexrl.statemanager.transfer.copy.mapped_memory import (
    PAGE_BYTES,
    MappedFile,
    discard,
    populate,
)

SUFFIX = ".segment"


class HostSegment:
    """One segment file. Not thread-safe, except for the contents of its memory."""

    def __init__(self, directory: Path, number: int, nbytes: int | None = None) -> None:
        """Create a segment of `nbytes`; absent: map the existing file.

        Raises:
            OSError: it failed; no new file is left behind.
        """
        self.number = number
        self.path = directory / f"{number:06d}{SUFFIX}"
        self.owner: str | None = None
        """Tenant of the segment's current or last contents; absent: none yet."""
        self.shared = nbytes is None
        """Whether another process may have the descriptor. A previous daemon may have shared that
        of an existing file."""
        self.used_bytes = 0
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if nbytes is None else os.O_CREAT | os.O_EXCL)
        fd = os.open(self.path, flags, 0o600)
        try:
            if nbytes is not None:
                os.ftruncate(fd, nbytes)
            size = os.fstat(fd).st_size
            self._file = MappedFile(fd, size // PAGE_BYTES * PAGE_BYTES)
            # Other users can neither write through this descriptor nor reopen it for writing.
            self._reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            if nbytes is not None:
                self.path.unlink()
            raise error if isinstance(error, OSError) else OSError(str(error)) from error
        finally:
            os.close(fd)
        self.nbytes = self._file.nbytes
        self.address = self._file.address
        self.view = self._file.view

    @property
    def whole(self) -> Piece:
        """The whole segment."""
        return Piece(self.number, 0, self.nbytes)

    def share_descriptor(self) -> int:
        """The segment's read-only descriptor, which the caller duplicates."""
        self.shared = True
        return self._reader

    def touched(self) -> FreeRanges:
        """Ranges with pages."""
        found = FreeRanges()
        end = 0
        while end < self.nbytes:
            try:
                start = os.lseek(self._reader, end, os.SEEK_DATA)
            except OSError:
                # ENXIO: the rest of the file is a hole.
                break
            end = min(os.lseek(self._reader, start, os.SEEK_HOLE), self.nbytes)
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

    def close(self) -> None:
        """Unmap the segment; the file stays."""
        self._file.close()
        os.close(self._reader)

    def remove(self) -> None:
        """Unmap and delete the segment. A process that still has a descriptor reads zeros and keeps
        no memory allocated."""
        self.discard(self.whole)
        self.path.unlink(missing_ok=True)
        os.close(self._reader)
        # An exception's traceback may still hold a view; the mapping ends with it.
        with suppress(BufferError):
            self._file.close()
