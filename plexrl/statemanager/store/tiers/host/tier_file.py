"""A numbered file of the host tier, mapped in the daemon."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from plexrl.process.memory.numa import set_memory_policy
from plexrl.statemanager.bytes.mapped_memory import FileMapping
from plexrl.statemanager.layout.ranges import PAGE_BYTES, Piece


class TierFile:
    """A mapped file, and a read-only descriptor of it for other processes."""

    def __init__(
        self,
        path: Path,
        number: int,
        nbytes: int | None,
        *,
        sparse: bool = False,
        memory_nodes: Sequence[int] = (),
    ) -> None:
        """Create a file of `nbytes` zeros; absent: map the existing file. Pages that it does not
        have yet are allocated on `memory_nodes`; none: all.

        Raises:
            OSError: it failed; no new file is left behind.
        """
        self.number = number
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if nbytes is None else os.O_CREAT | os.O_EXCL)
        fd = os.open(path, flags, 0o600)
        try:
            if nbytes is not None:
                os.ftruncate(fd, nbytes)
            self._file = FileMapping(fd, os.fstat(fd).st_size // PAGE_BYTES * PAGE_BYTES)
            # Before pages are allocated, which then lie where they should.
            set_memory_policy(self._file.address, self._file.nbytes, preferred=memory_nodes)
            if nbytes is not None and not sparse:
                os.posix_fallocate(fd, 0, nbytes)
            # Other users can neither write through this descriptor nor reopen it for writing.
            self.reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            if nbytes is not None:
                path.unlink()
            raise error if isinstance(error, OSError) else OSError(str(error)) from error
        finally:
            os.close(fd)
        self.nbytes = self._file.nbytes
        self.address = self._file.address
        self.view = self._file.view

    @property
    def whole(self) -> Piece:
        """The whole file."""
        return Piece(self.number, 0, self.nbytes)

    def close(self) -> None:
        """Unmap the file without deleting it."""
        os.close(self.reader)
        # An exception's traceback may still hold a view; the mapping ends with it.
        with suppress(BufferError):
            self._file.close()

    def remove(self) -> None:
        """Unmap and delete the file."""
        self.path.unlink(missing_ok=True)
        self.close()
