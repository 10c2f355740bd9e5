"""Whether the shell holds, why, and whether time has passed in which it could hear nobody."""

import asyncio
import logging
import time

from plexrl.errors import StorageError
from plexrl.process.conditions import Conditions

LOG = logging.getLogger(__name__)

HELD_RETRY_S = 0.5
"""Between two tries to write what a journal that cannot take events has kept waiting."""
ROOM_RETRY_S = 30.0
"""Between two tries to make room in a full journal."""
BEAT_S = 1.0
STOPPED_S = 5.0
"""A pause between two beats that is so much too long says that the process was stopped."""


class JournalHold:
    """The shell's: begun by a journal that refuses, ended by one that takes events in."""

    def __init__(self) -> None:
        self.conditions = Conditions()
        self.error: StorageError | None = None
        """Why requests are refused now; absent: they are not."""
        self.was_deaf = False
        """Nobody could be heard for a while, and the core has not been told."""
        self._room_tried_at: float | None = None
        self._beaten_at = time.monotonic()

    def begin(self, error: StorageError) -> None:
        """Refuse requests with `error` from here on."""
        error.details.setdefault("retry_after_s", HELD_RETRY_S)
        if self.error is None or self.error.code != error.code:
            LOG.error("holding: %s", error)
            self.conditions.clear()
        self.error = error
        self.conditions.hold(error)

    def end(self, *, core_knows: bool) -> None:
        """The journal takes events in. `core_knows`: its first event says that nobody was heard."""
        if self.error is None:
            return
        LOG.warning("the journal takes events in again; going on")
        self.conditions.clear()
        self.error = None
        self._room_tried_at = None
        self.was_deaf = not core_knows

    def may_make_room(self) -> bool:
        """Whether it is time to try to make room in the journal."""
        now = time.monotonic()
        if self._room_tried_at is not None and now < self._room_tried_at + ROOM_RETRY_S:
            return False
        self._room_tried_at = now
        return True

    def notice_stop(self) -> None:
        """Find out whether this process was stopped, or its machine asleep."""
        now = time.monotonic()
        if now - self._beaten_at > STOPPED_S + BEAT_S:
            LOG.warning("this process did not run for %.1f s", now - self._beaten_at)
            self.was_deaf = True
        self._beaten_at = now

    async def beat(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            self.notice_stop()
