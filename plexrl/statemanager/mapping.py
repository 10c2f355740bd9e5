"""Mapped memory by address: what moves need of the operating system beyond `mmap`.

Calls go through `ctypes` where Python's own would hold the interpreter's lock for as long as pages
are faulted in.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_BYTES = 4096

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
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


class JoinedRegions:
    """A version's data in one piece of read-only memory, mapped from its regions."""

    def __init__(self, regions: Sequence[Region], nbytes: int) -> None:
        """Raises OSError: a region cannot be mapped."""
        self._nbytes = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
        # The address range is reserved first, so nothing else can come to lie in it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = _map(None, self._nbytes, 0, flags, -1, 0)
        try:
            for region in regions:
                within = 0 <= region.data_offset <= self._nbytes - region.nbytes
                if not within or region.data_offset % PAGE_BYTES:
                    raise OSError(errno.EINVAL, f"{region} lies outside of the version's data")
                _map(
                    self.address + region.data_offset,
                    region.nbytes,
                    mmap.PROT_READ,
                    mmap.MAP_SHARED | _MAP_FIXED,
                    region.fd,
                    region.offset,
                )
        except BaseException:
            self.close()
            raise
        array = (ctypes.c_ubyte * nbytes).from_address(self.address)
        self.view = memoryview(array).cast("B").toreadonly()
        """Of the data; not to be touched after `close`."""

    def close(self) -> None:
        """Unmap everything."""
        if self.address:
            _LIBC.munmap(self.address, self._nbytes)
            self.address = 0


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


def _map(
    address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int
) -> int:
    found = _LIBC.mmap(address, nbytes, protection, flags, fd, offset)
    if found is None or found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    assert isinstance(found, int)
    return found
