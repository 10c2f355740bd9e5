"""Writes the journal of one rollout in another thread, many events in one commit.

Events are decided in order and written in that order. What was decided between two commits is in
the second one. The effect of an event is released only after its commit.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable

from plexrl.rollout.service.journal.store import JournalEntry, RolloutStore

LOG = logging.getLogger(__name__)


class JournalWriter:
    """The queue of events that are not durable yet. It belongs to one event loop."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._queue: list[tuple[JournalEntry, Callable[[], None]]] = []
        self._added = 0
        self._written = 0
        self._progress = asyncio.Event()
        """Set, and replaced, after each commit."""
        self._task: asyncio.Task[None] | None = None

    def add(self, entry: JournalEntry, release: Callable[[], None]) -> None:
        """Write an entry soon; call `release` once it is durable."""
        self._queue.append((entry, release))
        self._added += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write())
            self._task.add_done_callback(_check)

    async def settled(self) -> None:
        """Wait until everything that was added before is durable and released."""
        wanted = self._added
        while self._written < wanted:
            await self._progress.wait()

    async def idle(self) -> None:
        """Wait until nothing is left to write."""
        while self._task is not None:
            await self._progress.wait()

    async def _write(self) -> None:
        while self._task is not None:
            batch, self._queue = self._queue, []
            try:
                await asyncio.to_thread(self._store.write, [entry for entry, _ in batch])
            except sqlite3.Error as error:
                # The coordinator is ahead of the store: the next process begins from the store.
                LOG.critical("%s cannot be written: %s; ending", self._store.path, error)
                os._exit(1)
            for _, release in batch:
                release()
            self._written += len(batch)
            if not self._queue:
                self._task = None
            self._progress.set()
            self._progress = asyncio.Event()


def _check(task: "asyncio.Task[None]") -> None:
    """End the process if a writer's task failed, since nobody would write what follows."""
    if not task.cancelled() and (error := task.exception()) is not None:
        LOG.critical("the journal's writer failed; ending", exc_info=error)
        os._exit(1)
