"""The memory that a worker's tensors live in: one anonymous file, shared with the StateManager.

On a CPU node this is the device tier. The worker passes the file's descriptor to the daemon, which
copies to and from the same pages; giving the pages back leaves every address valid, as unmapping
physical memory under a reserved range does on a GPU.
"""

import mmap
import os


class Arena:
    """A memory file of at least `nbytes` bytes, mapped; sparse until touched, zero at first."""

    def __init__(self, nbytes: int, name: str = "arena") -> None:
        self.nbytes = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.fd = os.memfd_create(f"plexrl-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self._map = mmap.mmap(self.fd, self.nbytes)
        self.buffer = memoryview(self._map)
        """Writable, of the whole arena."""

    def resident_bytes(self) -> int:
        """Memory that the arena occupies now."""
        return resident_bytes(self.fd)

    def discard(self) -> None:
        """Give all pages back; addresses stay valid, contents read as zero."""
        self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Give up the descriptor; pages live on while tensors or the daemon still hold them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def resident_bytes(fd: int) -> int:
    """Bytes of memory that the file behind `fd` occupies."""
    return os.fstat(fd).st_blocks * 512
