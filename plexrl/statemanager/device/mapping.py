"""Memory mappings at chosen addresses, which Python's `mmap` cannot create, and byte copies.

Addresses are integers. The caller must ensure that nothing uses the previous mapping at an address.
"""

import ctypes
import mmap
import os

PAGE = mmap.PAGESIZE
PAGE_TABLE_BYTES = 2 << 20
"""Memory of one page table: the kernel moves a mapping by whole tables if both of its addresses are
aligned to this, and page by page otherwise."""

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
"""Linux values; the `mmap` module lacks both before Python 3.13."""
_MAP_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_mremap = _libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_void_p),
)
_MREMAP_MAYMOVE_FIXED = 3
_MREMAP_DONTUNMAP = 4
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_REMOVE = 9
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

move = ctypes.memmove
"""`move(target, source, nbytes)`; releases the GIL."""


def map_zero(nbytes: int, address: int | None = None) -> int:
    """Map private zero memory, which uses no pages until it is written. `address` replaces the
    mapping there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return _map(address, nbytes, flags, -1)


def reserve_aligned(nbytes: int) -> int:
    """As `map_zero`, aligned to `PAGE_TABLE_BYTES`."""
    found = map_zero(nbytes + PAGE_TABLE_BYTES)
    address = -(-found // PAGE_TABLE_BYTES) * PAGE_TABLE_BYTES
    for start, end in ((found, address), (address + nbytes, found + nbytes + PAGE_TABLE_BYTES)):
        if end > start:
            unmap(start, end - start)
    return address


def map_file(
    fd: int,
    nbytes: int,
    address: int | None = None,
    *,
    protection: int = _READ_WRITE,
    populate: bool = True,
) -> int:
    """Map the file's first bytes, shared. `populate` maps all pages now; `address` replaces the
    mapping there."""
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    return _map(address, nbytes, flags, fd, protection)


def map_over(source: int, nbytes: int, address: int) -> None:
    """Move a mapping with its pages to `address`, replacing the mapping there."""
    if _mremap(source, nbytes, nbytes, _MREMAP_MAYMOVE_FIXED, address) == _MAP_FAILED:
        raise _last_error()


def move_pages(source: int, nbytes: int, address: int) -> None:
    """As `map_over`, but the source's addresses stay mapped, without pages.

    Raises:
        OSError: the kernel is older than 5.13.
    """
    flags = _MREMAP_MAYMOVE_FIXED | _MREMAP_DONTUNMAP
    if _mremap(source, nbytes, nbytes, flags, address) == _MAP_FAILED:
        raise _last_error()


def punch(address: int, nbytes: int) -> None:
    """Free a file's mapped pages, in every process that maps them; they read as zero."""
    if _madvise(address, nbytes, _MADV_REMOVE) != 0:
        raise _last_error()


def unmap(address: int, nbytes: int) -> None:
    """Unmap a range; its addresses may be reused."""
    if _munmap(address, nbytes) != 0:
        raise _last_error()


def set_zero(address: int, nbytes: int) -> None:
    """Write zeros; releases the GIL."""
    ctypes.memset(address, 0, nbytes)


def _map(
    address: int | None, nbytes: int, flags: int, fd: int, protection: int = _READ_WRITE
) -> int:
    if address is not None:
        flags |= _MAP_FIXED
    found: int | None = _mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        raise _last_error()
    return found


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
