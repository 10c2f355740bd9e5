"""File access that bypasses the page cache, where the file system supports it."""

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

_VECTORS_MAX = 1024
"""Buffers per system call (IOV_MAX)."""
_NOT_SUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF})


def open_direct(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor that bypasses the page cache, if the file system supports it."""
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, mode)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if flags & os.O_EXCL:
            # The refused call has created the file.
            path.unlink(missing_ok=True)
        return os.open(path, flags, mode)


def reserve(fd: int, nbytes: int) -> None:
    """Allocate the file's space now, if the file system supports it. Raises OSError: it is full."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


def transfer(
    move: Callable[[int, list[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    offset: int,
) -> int:
    """Read or write all of `views` at `offset`, with `os.preadv` or `os.pwritev`; returns the byte
    count, smaller only at the end of the file."""
    left = list(views)
    total = 0
    while left:
        try:
            count = move(fd, left[:_VECTORS_MAX], offset + total)
        except OSError as error:
            # Some file systems accept O_DIRECT at open and reject it, or the alignment, later.
            if error.errno != errno.EINVAL or not _use_cache(fd):
                raise
            continue
        if count == 0:
            break
        total += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return total


def _use_cache(fd: int) -> bool:
    """Switch a descriptor to the page cache; returns False if it used the cache already."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)
