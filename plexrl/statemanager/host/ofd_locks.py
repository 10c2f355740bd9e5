"""Who has a file open or mapped, by the kernel's word: locks that end with the last of its holders.

A lock belongs to the open file that it was made on. Copies of its descriptor in any process share
it, and so do mappings, whether or not a descriptor is left. So it ends when nobody can reach the
memory that way any more, however its holders ended.
"""

import fcntl
import os
import struct

_WRITER, _READER = 0, 1
"""Bytes that are locked; they stand for roles and need not exist in the file."""
_FLOCK = struct.Struct("hhqqi4x")


def open_for_writer(path: str) -> int:
    """A descriptor to write with, which counts as a writer until all that came of it is gone."""
    return _open(path, os.O_RDWR, _WRITER)


def open_for_reader(path: str) -> int:
    """A descriptor that only reads, which counts as a reader likewise."""
    return _open(path, os.O_RDONLY, _READER)


def has_writer(fd: int) -> bool:
    """Whether somebody may still write to the file. `fd` is any descriptor of it."""
    return _is_locked(fd, _WRITER, 1)


def has_holder(fd: int) -> bool:
    """Whether somebody may still read or write the file."""
    return _is_locked(fd, _WRITER, 2)


def _open(path: str, flags: int, byte: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        lock = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_locked(fd: int, start: int, count: int) -> bool:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, count, 0)
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
