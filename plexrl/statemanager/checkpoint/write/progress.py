"""How far a checkpoint is, how fast it may go, and whether it goes on."""

import threading
import time

from plexrl.errors import OperationCancelledError

BURST_S = 0.05
"""A throttled writer may be this much ahead of its rate."""


class Progress:
    """One checkpoint's. Written by its writer, read by anyone."""

    def __init__(self, *, bytes_per_s: int | None = None) -> None:
        """`bytes_per_s` absent: as fast as the disk."""
        self.bytes_done = 0
        self.bytes_total = 0
        self._bytes_per_s = bytes_per_s
        self._cancelled = threading.Event()
        self._started: float | None = None
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        """Since the start, or to the end where there was one."""
        if self._started is None:
            return 0.0
        return (self._ended or time.monotonic()) - self._started

    def start(self, bytes_total: int) -> None:
        """Writing begins, or begins anew."""
        self.bytes_done, self.bytes_total = 0, bytes_total
        self._started, self._ended = time.monotonic(), None

    def end(self) -> None:
        """Writing is over, one way or another."""
        self._ended = time.monotonic()

    def add(self, nbytes: int) -> None:
        """So much more is written; returns when the next bytes may be.

        Raises:
            OperationCancelledError: somebody cancelled it.
        """
        self.bytes_done += nbytes
        ahead_s = 0.0
        if self._bytes_per_s is not None:
            ahead_s = self.bytes_done / self._bytes_per_s - self.seconds - BURST_S
        if self._cancelled.wait(ahead_s) if ahead_s > 0 else self._cancelled.is_set():
            raise OperationCancelledError("the checkpoint was cancelled: nothing of it remains")

    def cancel(self) -> None:
        """Have the writer end at its next step."""
        self._cancelled.set()
