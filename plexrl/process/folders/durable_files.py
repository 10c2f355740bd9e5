"""Files that survive a power cut: the one way to write what the journal or another file names.

Without a flush, a file system may write a rename before the file's contents: after a power cut the
file has its name and zero bytes. So a file is written under a temporary name, flushed and renamed,
and then its folder is flushed. Only after that may a record that names the file be stored. On
memory file systems a flush costs nothing.

A file whose flush failed is written anew: the kernel reports a lost write once only.
"""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

Contents = bytes | bytearray | memoryview

NO_FOLDER_FLUSH = frozenset({errno.EINVAL, errno.ENOTSUP})
"""Answers of file systems that flush a folder together with its files."""


def write_durably(path: Path, *parts: Contents, mode: int = 0o644) -> None:
    """Replace a file atomically, with these bytes. When the call returns, the file survives a power
    cut; if it raises `OSError`, the former file is unchanged.

    `mode` is that of the new file, reduced by the process's umask. Two writers of one file must
    exclude each other.
    """
    part = stage_durably(path, *parts, mode=mode)
    try:
        rename_durably(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def stage_durably(path: Path, *parts: Contents, mode: int = 0o644) -> Path:
    """Write and flush a temporary file beside `path`, for `rename_durably`; returns its path.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        create_durably(part, *parts, mode=mode)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    return part


def create_durably(path: Path, *parts: Contents, mode: int = 0o600) -> None:
    """Write and flush a new file, whose name is not durable yet. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            while view.nbytes:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_durably(part: Path, path: Path) -> None:
    """Give a flushed file, or a folder whose contents are flushed, its name. Raises `OSError`."""
    part.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file's contents, or the names in a folder. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_FLUSH or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, and the folder. Raises `OSError`."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            flush(path)
    flush(folder)


def make_folders_durably(path: Path, *, mode: int = 0o777) -> None:
    """Create a folder and its parents where they are missing; their names survive a power cut.

    Raises:
        OSError: a folder cannot be created.
    """
    missing: list[Path] = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(mode=mode, exist_ok=True)
        flush(folder.parent)


class FolderFlush:
    """Flushes the names in one folder, for many threads: calls that come while a flush runs share
    the next one. So a hundred files that arrive together cost one or two flushes of their folder.
    """

    def __init__(self, folder: Path, flush_folder: Callable[[Path], None] = flush) -> None:
        self._folder = folder
        self._flush_folder = flush_folder
        self._turn = threading.Condition()
        self._begun = 0
        self._done = 0
        self._is_running = False

    def flush(self) -> None:
        """Return once a flush that began after this call has ended. Raises `OSError`."""
        with self._turn:
            # The one that runs may have missed this caller's rename.
            wanted = self._begun + 1
            while self._is_running and self._done < wanted:
                self._turn.wait()
            if self._done >= wanted:
                return
            self._begun += 1
            self._is_running = True
            number = self._begun
        try:
            self._flush_folder(self._folder)
        except BaseException:
            # The callers that wait try it themselves, and each gets its own error.
            self._end(self._done)
            raise
        self._end(number)

    def _end(self, done: int) -> None:
        with self._turn:
            self._done = done
            self._is_running = False
            self._turn.notify_all()
