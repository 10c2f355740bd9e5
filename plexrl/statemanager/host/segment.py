"""A segment of the host tier's memory: a sparse file, mapped whole, and a descriptor to lend."""

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
    """Not thread-safe but for what lies in its memory."""

    def __init__(self, directory: Path, number: int, nbytes: int | None = None) -> None:
        """Make a segment of `nbytes`; absent: map the one that is there.

        Raises:
            OSError: that cannot be; nothing new is left behind.
        """
        self.number = number
        self.path = directory / f"{number:06d}{SUFFIX}"
        self.owner: str | None = None
        """Whose bytes it holds or held last; absent: nobody's yet."""
        self.lent = nbytes is None
        """Whether somebody may have its descriptor. One that was found may have been lent by a
        daemon before this one."""
        self.used_bytes = 0
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if nbytes is None else os.O_CREAT | os.O_EXCL)
        fd = os.open(self.path, flags, 0o600)
        try:
            if nbytes is not None:
                os.ftruncate(fd, nbytes)
            size = os.fstat(fd).st_size
            self._file = MappedFile(fd, size // PAGE_BYTES * PAGE_BYTES)
            # Whoever is lent this one cannot write through it; nor can it be opened anew for that
            # by a user other than the file's.
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
        """All of it."""
        return Piece(self.number, 0, self.nbytes)

    def lend(self) -> int:
        """A read-only descriptor, the segment's own, to be duplicated."""
        self.lent = True
        return self._reader

    def touched(self) -> FreeRanges:
        """Ranges that have pages."""
        found = FreeRanges()
        end = 0
        while end < self.nbytes:
            try:
                start = os.lseek(self._reader, end, os.SEEK_DATA)
            except OSError:
                # ENXIO: nothing but a hole from here on.
                break
            end = min(os.lseek(self._reader, start, os.SEEK_HOLE), self.nbytes)
            if start >= self.nbytes:
                break
            found.add(Piece(self.number, start, end - start))
        return found

    def set_aside(self, piece: Piece) -> None:
        """Have the file system keep memory for a range. Raises OSError: it has none."""
        with self.path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), piece.offset, piece.nbytes)
        # Mapped at once: page by page, as they are touched, takes ten times as long.
        populate(self.address + piece.offset, piece.nbytes)

    def clear(self, piece: Piece) -> None:
        """Fill a range with zeros; its pages stay."""
        ctypes.memset(self.address + piece.offset, 0, piece.nbytes)

    def discard(self, piece: Piece) -> None:
        """Give a range's pages back to the system."""
        discard(self.address + piece.offset, piece.nbytes)

    def close(self) -> None:
        """Unmap it; the file stays."""
        self._file.close()
        os.close(self._reader)

    def remove(self) -> None:
        """Unmap and delete it. Who still has a descriptor finds zeros, and keeps no memory of
        ours."""
        self.discard(self.whole)
        self.path.unlink(missing_ok=True)
        os.close(self._reader)
        # A view may linger in the traceback of an error; the memory goes when that does.
        with suppress(BufferError):
            self._file.close()
