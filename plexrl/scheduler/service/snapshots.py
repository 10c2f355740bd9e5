"""Writes snapshots of the core: at intervals, on request, and to free space in a full journal."""

import asyncio
import logging
from collections.abc import Callable

from plexrl.errors import SchedulerFaultError, StorageError
from plexrl.process.conditions import Conditions
from plexrl.scheduler.service.journal.history.writer import HistoryWriter
from plexrl.scheduler.service.journal.journal import Journal

LOG = logging.getLogger(__name__)


class SnapshotWriter:
    """Encodes the core between two events and writes it in the background."""

    def __init__(
        self,
        dump: Callable[[], bytes],
        journal: Journal,
        conditions: Conditions,
        *,
        position: int,
        events: int,
        history: Callable[[], HistoryWriter | None] = lambda: None,
    ) -> None:
        self._dump = dump
        self._journal = journal
        self._conditions = conditions
        self.position = position
        """Position of the last snapshot that was started."""
        self._events = events
        """Events between two snapshots."""
        self._history = history
        self._task: asyncio.Task[None] | None = None
        self.is_wanted = False
        """Whether to write the next snapshot as soon as possible."""
        self.error = ""
        """Why the core could not be encoded the last time; empty: it could."""

    def start_if_due(self, position: int, at: float) -> None:
        """Start a snapshot of the core after the event at `position`, if one is due."""
        if position - self.position < self._events and not self.is_wanted:
            return
        if not self.is_busy():
            self.is_wanted = False
            self._start(position, at, kept=2)

    def free_space(self, position: int, at: float) -> None:
        """Write a snapshot, and delete the events that it replaces and the previous snapshot."""
        self._start(position, at, kept=1)

    def is_busy(self) -> bool:
        """Whether a snapshot is being written."""
        return self._task is not None and not self._task.done()

    async def finish(self, position: int, at: float, *, is_consistent: bool) -> None:
        """Wait for a running snapshot, and write a last one if events came after it."""
        if self._task is not None:
            await self._task
        if position > self.position and is_consistent:
            body = self._encode(position)
            if body is not None:
                self.position = position
                await self._write(position, at, body, kept=2)

    def _start(self, position: int, at: float, *, kept: int) -> None:
        # Also after a failure the next attempt comes after as many events again.
        self.position = position
        body = self._encode(position)
        if body is not None:
            self._task = asyncio.create_task(self._write(position, at, body, kept=kept))

    def _encode(self, position: int) -> bytes | None:
        """The core as bytes; None if encoding fails, which only makes the next start slower."""
        try:
            body = self._dump()
        except MemoryError:
            raise
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self._conditions.hold(SchedulerFaultError(self.error))
            LOG.critical(
                "a bug in PlexRL: the state at event %d cannot be encoded; the scheduler "
                "continues, and its journal grows: please report it",
                position,
                exc_info=error,
            )
            return None
        self.error = ""
        return body

    async def _write(self, position: int, at: float, body: bytes, *, kept: int) -> None:
        try:
            await asyncio.to_thread(self._journal.write_snapshot, position, at, body)
            await asyncio.to_thread(self._journal.compact, kept, self._deletable(position, kept))
        except StorageError as error:
            # No event is lost; the next start only takes longer. The next event and the renewal
            # detect a lost lease.
            LOG.error("no snapshot at event %d: %s", position, error)
        else:
            LOG.info("snapshot at event %d: %d bytes", position, len(body))
            if (history := self._history()) is not None:
                history.notify()

    def _deletable(self, position: int, kept: int) -> int | None:
        """The last event that may be deleted; None: no bound. A full journal is shortened although
        the archive does not have its events."""
        history = self._history()
        return None if history is None or kept == 1 else history.deletable(position)
