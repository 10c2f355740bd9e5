"""A file of a checkpoint that is sent to an object store while it is assembled.

The caller fills one buffer while a thread sends others. The object appears at `finish`, as a whole.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from plexrl.storage.multipart import MultipartUpload, begin_upload
from plexrl.storage.object_store import ObjectStore

PART_BYTES = 16 << 20
"""Size of one part, if the file has not more than `PARTS_MAX` of them."""
PARTS_MAX = 9_000
"""S3 allows 10 000."""


class ObjectStream:
    """Get `space`, fill it, `commit` it; `finish` publishes the object."""

    def __init__(self, store: ObjectStore, key: str, nbytes: int, *, space_bytes_max: int) -> None:
        """Begins the upload. Raises `StoreUnavailableError`."""
        self._part_bytes = max(PART_BYTES, -(-nbytes // PARTS_MAX))
        self._buffer = memoryview(bytearray(self._part_bytes + space_bytes_max))
        self._filled = 0
        self._upload: MultipartUpload = begin_upload(store, key, nbytes, self._part_bytes)
        self._parts = 0
        self._threads = ThreadPoolExecutor(self._upload.parts_at_once)
        self._sending: list[Future[None]] = []
        self._is_finished = False

    def space(self, nbytes: int) -> memoryview:
        """Memory for the next `nbytes` of the file. Raises as `finish`."""
        if self._filled >= self._part_bytes:
            self._send(self._part_bytes)
        return self._buffer[self._filled : self._filled + nbytes]

    def commit(self, nbytes: int) -> None:
        """Record that `nbytes` of the space are filled."""
        self._filled += nbytes

    def append(self, data: bytes) -> None:
        """Append bytes. Raises as `finish`."""
        step = len(self._buffer) - self._part_bytes
        for start in range(0, len(data), step):
            part = data[start : start + step]
            self.space(len(part))[:] = part
            self.commit(len(part))

    def finish(self) -> None:
        """Send the rest and publish the object. Raises `StoreUnavailableError`."""
        while self._filled > 0:
            self._send(min(self._filled, self._part_bytes))
        self._wait(0)
        self._upload.publish()
        self._is_finished = True

    def __enter__(self) -> "ObjectStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        if not self._is_finished:
            self._upload.drop()

    def _send(self, nbytes: int) -> None:
        self._wait(self._upload.parts_at_once - 1)
        part = bytes(self._buffer[:nbytes])
        rest = self._filled - nbytes
        self._buffer[:rest] = bytes(self._buffer[nbytes : self._filled])
        self._filled = rest
        self._parts += 1
        self._sending.append(self._threads.submit(self._upload.send, self._parts, part))

    def _wait(self, count_max: int) -> None:
        """Wait until at most `count_max` parts are being sent."""
        while len(self._sending) > count_max or (self._sending and self._sending[0].done()):
            self._sending.pop(0).result()
