"""Mapped memory by address: what moves need of the operating system beyond `mmap`.

Calls go through `ctypes` where Python's own would hold the interpreter's lock for as long as pages
are faulted in.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass

PAGE_BYTES = 4096

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_MADV_REMOVE = 9
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where a run of a version's data lies in a file."""

    fd: int
    """A descriptor; on the wire, the index of one that came along."""
    offset: int
    """In the file, on a page boundary."""
    nbytes: int
    data_offset: int
    """In the version's data, on a page boundary."""


class MappedFile:
    """A file's first `nbytes` bytes, shared and writable, at one address until `close`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.address = address_of(self._map)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap it, once nobody has a view of it any more."""
        self.view.release()
        self._map.close()


def address_of(buffer: mmap.mmap | memoryview) -> int:
    """Where writable memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def populate(address: int, nbytes: int) -> None:
    """Have every page there, and mapped, before it is needed; contents stay."""
    if _LIBC.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    for start in range(address, address + nbytes, PAGE_BYTES):
        # Written with what it holds: kernels before 5.14 have no other way.
        byte = ctypes.c_char.from_address(start)
        byte.value = byte.value


def populate_for_reading(address: int, nbytes: int) -> None:
    """Have every page of a read-only mapping there before it is needed, where the kernel can
    (5.14); else pages come as they are touched."""
    start = address // PAGE_BYTES * PAGE_BYTES
    _LIBC.madvise(start, address + nbytes - start, _MADV_POPULATE_READ)


def discard(address: int, nbytes: int) -> None:
    """Give the pages of a shared mapping back to the system; they read as zero then."""
    if _LIBC.madvise(address, nbytes, _MADV_REMOVE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def equal(first: int, second: int, nbytes: int) -> bool:
    """Whether the memory at two addresses is the same, byte for byte."""
    return bool(_LIBC.memcmp(first, second, nbytes) == 0)
