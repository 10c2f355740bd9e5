"""Operations on mapped memory by address that `mmap` lacks.

Calls go through `ctypes`, because Python's own would hold the interpreter lock during page faults.
"""

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plexrl.statemanager.layout.ranges import PAGE_BYTES

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_MADV_REMOVE = 9
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of a version's data in a file."""

    fd: int
    """A descriptor; on the wire, the index of a descriptor in the message."""
    offset: int
    """Offset in the file, on a page boundary."""
    nbytes: int
    data_offset: int
    """Offset in the version's data, on a page boundary."""


def parts_of(regions: Sequence[Region], start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """(index of the region, offset in it, bytes) of each region's part of a range of the data.

    `regions` are in order of the data; the parts end early if they do not hold all of it.
    """
    end = start + nbytes
    first = bisect_right(regions, start, key=lambda region: region.data_offset) - 1
    for index in range(max(0, first), len(regions)):
        place = regions[index].data_offset
        last = min(end, place + regions[index].nbytes)
        if start >= end or start < place:
            return
        if start < last:
            yield index, start - place, last - start
            start = last


class FileMapping:
    """A file's first `nbytes` bytes, shared and writable, at one address until `close`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.address = address_of(self._map)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap the file. No view of it may be in use."""
        self.view.release()
        self._map.close()


def view_at(address: int, nbytes: int) -> memoryview:
    """The writable memory at an address."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def address_of(buffer: mmap.mmap | memoryview) -> int:
    """The address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def populate(address: int, nbytes: int) -> None:
    """Allocate and map every page in advance; contents stay."""
    if _LIBC.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    for start in range(address, address + nbytes, PAGE_BYTES):
        # Rewrite the byte: kernels before 5.14 have no other method.
        byte = ctypes.c_char.from_address(start)
        byte.value = byte.value


def populate_for_reading(address: int, nbytes: int) -> None:
    """Map every page of a read-only mapping in advance, if the kernel can (5.14); else pages are
    mapped when they are touched."""
    start = address // PAGE_BYTES * PAGE_BYTES
    _LIBC.madvise(start, address + nbytes - start, _MADV_POPULATE_READ)


def discard(address: int, nbytes: int) -> None:
    """Return the pages of a shared mapping to the system; they then read as zero."""
    if _LIBC.madvise(address, nbytes, _MADV_REMOVE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def equal(first: int, second: int, nbytes: int) -> bool:
    """Whether the bytes at two addresses are equal."""
    return bool(_LIBC.memcmp(first, second, nbytes) == 0)
