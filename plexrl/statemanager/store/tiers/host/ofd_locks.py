"""Detection of processes that have a file open or mapped, with open-file-description (OFD) locks.

A lock belongs to the open file description that it was set on. Duplicated descriptors in any
process share it, and mappings keep it alive without a descriptor. The kernel drops the lock when no
process can access the file through that description, even if its holders were killed.
"""

import fcntl
import os
import struct

_WRITER, _READER = 0, 1
"""Offsets of the locked bytes, one per role. They need not exist in the file."""
_FLOCK = struct.Struct("hhqqi4x")


def open_for_writer(path: str) -> int:
    """A read-write descriptor; a writer exists until all its duplicates and mappings are gone."""
    return _open(path, os.O_RDWR, _WRITER)


def open_for_reader(path: str) -> int:
    """A read-only descriptor; a reader exists until all its duplicates and mappings are gone."""
    return _open(path, os.O_RDONLY, _READER)


def has_writer(fd: int) -> bool:
    """Whether a process may still write to the file. `fd` is any descriptor of it."""
    return _is_locked(fd, _WRITER, 1)


def has_holder(fd: int) -> bool:
    """Whether a process may still read or write the file."""
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
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, count, 0)
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, query)
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
