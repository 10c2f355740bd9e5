"""Files of the host tier that lie apart from its segments: each is lent whole to one worker at a
time, which may write to it, or is a version's object that was made so. A worker's descriptor thus
reaches nothing but what is its own."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from plexrl.statemanager.host.free_ranges import Piece
from plexrl.statemanager.host.ofd_locks import has_holder
from plexrl.statemanager.transfer.copy.mapped_memory import PAGE_BYTES, MappedFile

SUFFIX = ".lent"


class LentFile:
    """One of them, mapped here too; touched here only while nobody can write to it."""

    def __init__(self, directory: Path, number: int, nbytes: int | None = None) -> None:
        """Make one of `nbytes`, of zeros; absent: map the one that is there.

        Raises:
            OSError: that cannot be; nothing new is left behind.
        """
        self.number = number
        self.path = directory / f"{number:06d}{SUFFIX}"
        self.owner = ""
        """For whom it was made, or used last; empty where that is not known."""
        self.is_idle = nbytes is None
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if nbytes is None else os.O_CREAT | os.O_EXCL)
        fd = os.open(self.path, flags, 0o600)
        try:
            if nbytes is not None:
                os.posix_fallocate(fd, 0, nbytes)
            self._file = MappedFile(fd, os.fstat(fd).st_size)
            self.reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            if nbytes is not None:
                self.path.unlink()
            raise
        finally:
            os.close(fd)
        self.nbytes = self._file.nbytes
        self.address = self._file.address
        self.view = self._file.view

    @property
    def whole(self) -> Piece:
        """All of it."""
        return Piece(self.number, 0, self.nbytes)

    def is_intact(self) -> bool:
        """Whether it has all its pages: its borrower could cut it."""
        found = os.fstat(self.reader)
        return found.st_size == self.nbytes and found.st_blocks * 512 >= self.nbytes

    def close(self) -> None:
        """Unmap it; the file stays."""
        os.close(self.reader)
        # A view may linger in the traceback of an error; the memory goes when that does.
        with suppress(BufferError):
            self._file.close()

    def remove(self) -> None:
        """Unmap and delete it. Who still has it mapped keeps it."""
        self.path.unlink(missing_ok=True)
        self.close()


class LentFiles:
    """Those of one host tier, by number. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Take in what is there, all of it idle."""
        self._directory = directory
        self._files: dict[int, LentFile] = {}
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            if not path.stat().st_size or path.stat().st_size % PAGE_BYTES:
                # Its borrower cut it, or it never got its size.
                path.unlink()
                continue
            number = int(path.name.removesuffix(SUFFIX))
            self._files[number] = LentFile(directory, number)

    def __contains__(self, number: int) -> bool:
        return number in self._files

    def __getitem__(self, number: int) -> LentFile:
        return self._files[number]

    def __iter__(self) -> Iterator[LentFile]:
        return iter(list(self._files.values()))

    @property
    def idle_bytes(self) -> int:
        """Kept for the next to borrow."""
        return sum(file.nbytes for file in self._files.values() if file.is_idle)

    @property
    def nbytes(self) -> int:
        """Of all."""
        return sum(file.nbytes for file in self._files.values())

    def take_idle(self, nbytes: int, owner: str) -> LentFile | None:
        """An idle one of just this size, of zeros or of what `owner` left; None: there is none."""
        found = [file for file in self._files.values() if file.is_idle and file.nbytes == nbytes]
        if not found:
            return None
        # The owner's own need not be cleared.
        file = min(found, key=lambda one: (one.owner != owner, one.number))
        if file.owner != owner:
            ctypes.memset(file.address, 0, file.nbytes)
        file.is_idle, file.owner = False, owner
        return file

    def make(self, number: int, nbytes: int, owner: str) -> LentFile:
        """A new one. Raises OSError: the file system has no room."""
        file = self._files[number] = LentFile(self._directory, number, nbytes)
        file.owner = owner
        return file

    def keep_or_remove(self, file: LentFile) -> LentFile | None:
        """Have a file idle that nobody needs; returns it where it has to go instead, because
        somebody still holds it, or cut it."""
        if has_holder(file.reader) or not file.is_intact():
            return self.forget(file)
        file.is_idle = True
        return None

    def forget(self, file: LentFile) -> LentFile:
        """It is to be removed."""
        return self._files.pop(file.number)

    def first_idle(self) -> LentFile | None:
        """The one to go first."""
        return next((file for file in self._files.values() if file.is_idle), None)
