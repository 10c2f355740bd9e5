"""Progress, rate limit and cancellation of a checkpoint."""

import threading
import time

from plexrl.errors import OperationCancelledError

BURST_S = 0.05
"""Time by which a throttled writer may be ahead of its rate."""


class CheckpointProgress:
    """Progress of one checkpoint. Its writers update it; any thread may read it."""

    def __init__(self, *, bytes_per_s: int | None = None) -> None:
        """`bytes_per_s` is the rate limit; absent: none."""
        self.bytes_done = 0
        self.bytes_total = 0
        self._elsewhere = 0
        """The part of `bytes_done` that other nodes wrote, which the rate does not limit."""
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._started: float | None = None
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        """Duration from the start to now, or to the end."""
        if self._started is None:
            return 0.0
        return (self._ended or time.monotonic()) - self._started

    def start(self, bytes_total: int) -> None:
        """Record that writing starts or restarts."""
        self.bytes_done, self.bytes_total, self._elsewhere = 0, bytes_total, 0
        self._started, self._ended = time.monotonic(), None

    def end(self) -> None:
        """Record that writing has ended."""
        self._ended = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Record written bytes; returns when the rate limit allows more.

        Raises:
            OperationCancelledError: the checkpoint was cancelled.
        """
        with self._lock:
            self.bytes_done += nbytes
        ahead_s = 0.0
        if self._bytes_per_s is not None:
            own = self.bytes_done - self._elsewhere
            ahead_s = own / self._bytes_per_s - self.seconds - BURST_S
        self.wait(ahead_s)

    def add_elsewhere(self, nbytes: int) -> None:
        """Record bytes that another node wrote."""
        with self._lock:
            self._elsewhere += nbytes
            self.bytes_done += nbytes

    def wait(self, seconds: float) -> None:
        """Wait so long.

        Raises:
            OperationCancelledError: the checkpoint was cancelled.
        """
        if self._cancelled.wait(seconds) if seconds > 0 else self._cancelled.is_set():
            raise OperationCancelledError("the checkpoint was cancelled: nothing of it remains")

    def cancel(self) -> None:
        """Make the writer stop at its next `add`."""
        self._cancelled.set()
