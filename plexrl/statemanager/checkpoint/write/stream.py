"""A file that is written from its start to its end, past the page cache.

Two buffers: one fills while a thread writes the other. Buffered writes would be copied once more,
push other tenants' pages out of memory, and were measured at a ninth of the bandwidth once synced.
"""

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

PAGE_BYTES = mmap.PAGESIZE
WRITE_BYTES = 8 << 20
"""Of one write, whatever the pieces that it is filled from."""


class StreamFile:
    """Make room, fill it, commit it; `close` makes the file as long as what was committed."""

    def __init__(self, path: Path, nbytes: int, *, space_bytes_max: int) -> None:
        """`nbytes` is set aside on the file system at once.

        Raises:
            OSError: it cannot be made, or the file system has no room for it.
        """
        self._fd = _open(path)
        size = WRITE_BYTES + -(-space_bytes_max // PAGE_BYTES) * PAGE_BYTES
        # Anonymous mappings lie on page boundaries, as writes past the cache want it.
        self._buffers = [memoryview(mmap.mmap(-1, size)) for _ in range(2)]
        self._filled = 0
        self._written = 0
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        try:
            _reserve(self._fd, nbytes)
        except BaseException:
            self._thread.shutdown()
            os.close(self._fd)
            raise

    def space(self, nbytes: int) -> memoryview:
        """Memory for the next `nbytes` of the file. Raises OSError if a write failed."""
        if self._filled >= WRITE_BYTES:
            self._flush()
        return self._buffers[0][self._filled : self._filled + nbytes]

    def commit(self, nbytes: int) -> None:
        """The space is filled."""
        self._filled += nbytes

    def append(self, data: bytes) -> None:
        """Write bytes that are at hand."""
        step = len(self._buffers[0]) - WRITE_BYTES
        for start in range(0, len(data), step):
            part = data[start : start + step]
            self.space(len(part))[:] = part
            self.commit(len(part))

    def finish(self) -> None:
        """Write what is left, cut the file to its length and have it on the disk.

        Raises:
            OSError: the file system refused.
        """
        end = self._written + self._filled
        tail = -self._filled % PAGE_BYTES
        self._buffers[0][self._filled : self._filled + tail] = bytes(tail)
        self._filled += tail
        self._flush()
        self._wait()
        os.ftruncate(self._fd, end)
        os.fsync(self._fd)

    def __enter__(self) -> "StreamFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
        os.close(self._fd)

    def _flush(self) -> None:
        """Begin to write the pages that are full; the rest stays for the next time."""
        whole = self._filled // PAGE_BYTES * PAGE_BYTES
        rest = self._filled - whole
        self._wait()
        self._buffers[1][:rest] = self._buffers[0][whole : self._filled]
        self._writing = self._thread.submit(
            _write, self._fd, self._buffers[0][:whole], self._written
        )
        self._buffers.reverse()
        self._written += whole
        self._filled = rest

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o644)


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            # Some file systems take O_DIRECT at open and refuse it, or our alignment, later.
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, max(nbytes, 1))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
