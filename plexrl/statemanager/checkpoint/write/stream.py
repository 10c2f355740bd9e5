"""Sequential direct writes of a file, bypassing the page cache.

There are two buffers: the caller fills one while a thread writes the other. Buffered writes would
cost a copy, evict other tenants' pages, and had a ninth of the bandwidth, including the sync.
"""

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from plexrl.statemanager.bytes.direct_io import open_direct, reserve, transfer

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
        self._fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        size = WRITE_BYTES + -(-space_bytes_max // PAGE_BYTES) * PAGE_BYTES
        # Anonymous mappings are page-aligned, as direct writes require.
        self._buffers = [memoryview(mmap.mmap(-1, size)) for _ in range(2)]
        self._filled = 0
        self._written = 0
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[int] | None = None
        try:
            reserve(self._fd, max(nbytes, 1))
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
            transfer, os.pwritev, self._fd, [self._buffers[0][:whole]], self._written
        )
        self._buffers.reverse()
        self._written += whole
        self._filled = rest

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None
