"""The shell round the core: receive, stamp the time, journal, call the core, run the commands.

An event is journalled *before* the core sees it, so nothing the core did is ever unknown after a
crash. The core refuses a bad event without changing anything; such an event stays in the journal
and is refused again in every replay, because the core is deterministic. The alternative, asking
the core first, would need its changes undone whenever the journal cannot be written.

All events that wait while one transaction runs share the next one. When the journal is full,
requests are refused with `JournalFullError`; reports of what has already happened are kept, in
order, until there is room.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from plexrl.errors import OverloadedError, PlexRLError, StorageError
from plexrl.ids import OperationId
from plexrl.scheduler.commands import (
    AbortOperation,
    Command,
    DiscardBlobs,
    LaunchWorkers,
    ReleaseState,
    RunOperation,
    SetTimer,
    StopWorkers,
)
from plexrl.scheduler.core import SchedulerCore
from plexrl.scheduler.events import Event, TimerFired
from plexrl.scheduler.journal import Journal
from plexrl.scheduler.links import AgentLinks, RouterLinks

LOG = logging.getLogger(__name__)

QUEUE_MAX = 10_000
BATCH_MAX = 512
FULL_RETRY_S = 0.5


class Clock:
    """Seconds since the epoch that never go back, not over restarts either."""

    def __init__(self, not_before: float) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset


@dataclass(slots=True)
class _Item:
    event: Event
    done: asyncio.Future[None]
    is_report: bool


class Shell:
    """Owns the core while the service runs."""

    def __init__(self, core: SchedulerCore, journal: Journal, clock: Clock) -> None:
        self.core = core
        self.clock = clock
        self.routers = RouterLinks()
        self.agents = AgentLinks()
        self._journal = journal
        self._queue: asyncio.Queue[_Item] = asyncio.Queue(QUEUE_MAX)
        self._kept: deque[_Item] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Condition()

    async def request(self, event: Event) -> None:
        """Have a client's event accepted.

        Raises:
            PlexRLError: refused by the core; nothing changed.
            JournalFullError: not accepted; nothing changed.
            OverloadedError: too many events wait.
        """
        item = _Item(event, asyncio.get_running_loop().create_future(), is_report=False)
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull as error:
            raise OverloadedError(
                "the scheduler has too many requests waiting: try again", retry_after_s=1.0
            ) from error
        await item.done

    async def report(self, event: Event) -> None:
        """Have an account of something that already happened accepted, whatever it takes."""
        item = _Item(event, asyncio.get_running_loop().create_future(), is_report=True)
        await self._queue.put(item)
        await item.done

    async def wait_final(self, operation: OperationId, timeout_s: float) -> None:
        """Return when the operation is final or `timeout_s` seconds have passed."""

        def is_final() -> bool:
            view = self.core.operation_view(operation, self.clock.now())
            return view["state"] in ("finished", "failed", "cancelled")

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(is_final)
        except TimeoutError:
            return

    async def run(self) -> None:
        """Take in events until cancelled."""
        while True:
            batch = await self._next_batch()
            now = self.clock.now()
            entries = [(item.event, now) for item in batch]
            try:
                await asyncio.to_thread(self._journal.append, entries)
            except StorageError as error:
                await self._not_journalled(batch, error)
                continue
            commands: list[Command] = []
            for item in batch:
                commands += self._handle(item, now)
            async with self._changed:
                self._changed.notify_all()
            await self._carry_out(commands)

    async def _next_batch(self) -> list[_Item]:
        batch = list(self._kept)
        self._kept.clear()
        if not batch:
            batch.append(await self._queue.get())
        while len(batch) < BATCH_MAX and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    async def _not_journalled(self, batch: list[_Item], error: StorageError) -> None:
        for item in batch:
            if item.is_report:
                self._kept.append(item)
            elif not item.done.done():
                item.done.set_exception(error)
        LOG.error("%s (%d reports kept)", error, len(self._kept))
        if self._kept:
            await asyncio.sleep(FULL_RETRY_S)

    def _handle(self, item: _Item, now: float) -> list[Command]:
        try:
            commands = self.core.handle(item.event, now)
        except PlexRLError as error:
            if not item.done.done():
                item.done.set_exception(error)
            return []
        if not item.done.done():
            item.done.set_result(None)
        return commands

    async def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case SetTimer():
                    self._set_timer(command.at)
                case RunOperation() | AbortOperation() | DiscardBlobs():
                    await self.routers.send(command)
                case LaunchWorkers() | StopWorkers() | ReleaseState():
                    self.agents.send(command)
                case _:
                    raise AssertionError(f"no way to carry out {command}")

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, at - self.clock.now())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_due)

    def _timer_due(self) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nobody awaits a timer; a full journal keeps it like any report.
        item = _Item(TimerFired(), done, is_report=True)
        if self._queue.full():
            self._timer = asyncio.get_running_loop().call_later(FULL_RETRY_S, self._timer_due)
        else:
            self._queue.put_nowait(item)
