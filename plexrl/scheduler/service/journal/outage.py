"""Tracks outages: the journal cannot be written, or the process was suspended."""

import asyncio
import logging
import time

from plexrl.errors import StorageError
from plexrl.process.conditions import Conditions

LOG = logging.getLogger(__name__)

HELD_RETRY_S = 0.5
"""Delay between two attempts to write the events that wait for the journal."""
SPACE_RETRY_S = 30.0
"""Delay between two attempts to free space in a full journal."""
BEAT_S = 1.0
STOPPED_S = 5.0
"""A heartbeat that is late by more than this means that the process was suspended."""


class JournalOutage:
    """State of the shell: an outage begins with a failed write and ends with a successful one."""

    def __init__(self) -> None:
        self.conditions = Conditions()
        self.error: StorageError | None = None
        """Why requests are refused; None: they are not."""
        self.was_unreachable = False
        """Peers could not reach the core for a while, and the core has not been notified."""
        self._space_tried_at: float | None = None
        self._beaten_at = time.monotonic()

    def begin(self, error: StorageError) -> None:
        """Start to refuse requests with `error`."""
        error.details.setdefault("retry_after_s", HELD_RETRY_S)
        if self.error is None or self.error.code != error.code:
            LOG.error("holding: %s", error)
            self.conditions.clear()
        self.error = error
        self.conditions.hold(error)

    def end(self, *, is_reported: bool) -> None:
        """The journal works again. `is_reported`: its first event notified the core of the
        outage."""
        if self.error is None:
            return
        LOG.warning("the journal accepts events again; continuing")
        self.conditions.clear()
        self.error = None
        self._space_tried_at = None
        self.was_unreachable = not is_reported

    def may_free_space(self) -> bool:
        """Whether it is time for another attempt to free space in the journal."""
        now = time.monotonic()
        if self._space_tried_at is not None and now < self._space_tried_at + SPACE_RETRY_S:
            return False
        self._space_tried_at = now
        return True

    def detect_suspension(self) -> None:
        """Detect that this process was stopped, or its machine slept."""
        now = time.monotonic()
        if now - self._beaten_at > STOPPED_S + BEAT_S:
            LOG.warning("this process did not run for %.1f s", now - self._beaten_at)
            self.was_unreachable = True
        self._beaten_at = now

    async def beat(self) -> None:
        """Check at intervals, until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            self.detect_suspension()
