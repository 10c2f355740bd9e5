"""Sequential direct writes of a file, bypassing the page cache.

There are two buffers: the caller fills one while a thread writes the other. Buffered writes would
cost a copy, evict other tenants' pages, and had a ninth of the bandwidth, including the sync.
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
"""Size of one write."""


class StreamFile:
    """Get `space`, fill it, `commit` it; `finish` truncates the file to the committed length."""

    def __init__(self, path: Path, nbytes: int, *, space_bytes_max: int) -> None:
        """Reserves `nbytes` on the file system at once.

        Raises:
            OSError: the file cannot be created, or does not fit the file system.
        """
        self._fd = _open(path)
        size = WRITE_BYTES + -(-space_bytes_max // PAGE_BYTES) * PAGE_BYTES
        # Anonymous mappings are page-aligned, as direct writes require.
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
        """Memory for the next `nbytes` of the file. Raises OSError: an earlier write failed."""
        if self._filled >= WRITE_BYTES:
            self._flush()
        return self._buffers[0][self._filled : self._filled + nbytes]

    def commit(self, nbytes: int) -> None:
        """Record that `nbytes` of the space are filled."""
        self._filled += nbytes

    def append(self, data: bytes) -> None:
        """Append bytes."""
        step = len(self._buffers[0]) - WRITE_BYTES
        for start in range(0, len(data), step):
            part = data[start : start + step]
            self.space(len(part))[:] = part
            self.commit(len(part))

    def finish(self) -> None:
        """Write the rest, truncate the file to its length and flush it to the disk.

        Raises:
            OSError: the file system failed.
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
        """Start the write of the full pages; the rest stays in the buffer."""
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
            # Some file systems accept O_DIRECT at open but refuse it, or the alignment, at a write.
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
