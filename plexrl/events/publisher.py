"""Publishes a cluster's changes: looks for them, and hands them to the connection of a broker.

Nothing waits for the broker. Looking takes time of the scheduler's event loop, so looks are
`interval_s` apart, and further apart if one takes long.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import msgspec

from plexrl.errors import LeaseLostError
from plexrl.events.broker import Broker
from plexrl.events.config import BrokerConfig, check_installed
from plexrl.events.outbox import EventOutbox, Message
from plexrl.events.records import JobRecord, Record, SchedulerRecord

LOG = logging.getLogger(__name__)

STOP_S = 8.0
"""Time limit for the end of a publisher."""
LOOKING_PART_MAX = 0.02
"""Maximum part of the time that is spent on looking for changes."""


class Records(Protocol):
    """The newest record of every object, by topic below the prefix."""

    def newest(self) -> dict[str, Record]:
        """The records of the last look."""
        ...

    def look(self, now: float) -> Sequence[tuple[str, Record | None]]:
        """Look for changes; None: the object does not exist any more."""
        ...

    def remember_since(self, name: str, state: str, since: float) -> None:
        """The broker knew since when an object had a state."""
        ...


class Publisher:
    """Publishes the changes of `records`."""

    def __init__(
        self,
        config: BrokerConfig,
        records: Records,
        clock: Callable[[], float],
        holder: str,
        may_look: Callable[[], Awaitable[None]],
        may_publish: Callable[[], Awaitable[None]],
    ) -> None:
        """`may_look` returns when the records can be read; `may_publish` raises `LeaseLostError`
        if another scheduler leads.

        Raises:
            InvalidRequestError: the MQTT client is not installed.
        """
        check_installed()
        self._config = config
        self._records = records
        self._clock = clock
        self._may_look = may_look
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox = EventOutbox(config.queue_max)
        online = SchedulerRecord(state="online", since=clock(), holder=holder, version=_version())
        self.broker = Broker(config, self._outbox, self._all_states, may_publish, online)

    def notify(self, hints: Iterable[tuple[str, msgspec.Struct]] = ()) -> None:
        """Something may have changed; `hints` are messages that are not retained."""
        for name, hint in hints:
            self._outbox.put(Message(name, msgspec.json.encode(hint), is_retained=False))
        self._changed.set()

    async def run(self) -> None:
        """Publish until `close`, or until another scheduler leads."""
        await self._may_look()
        # Sent as a whole with the first connection.
        self._records.look(self._clock())
        self._tasks = {
            asyncio.create_task(self._look()),
            asyncio.create_task(self.broker.run()),
        }
        done, others = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            # `close` cancels both tasks; a second cancellation would interrupt the goodbye.
            if not task.cancelled():
                for other in others:
                    other.cancel()
                task.result()

    async def close(self) -> None:
        """Say goodbye to the broker, and end."""
        await _end(self._tasks)

    async def _look(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._may_look()
            began_at = time.perf_counter()
            for name, record in self._records.look(self._clock()):
                self._outbox.put(self._message(name, record))
            took_s = time.perf_counter() - began_at
            await asyncio.sleep(max(self._config.interval_s, took_s / LOOKING_PART_MAX))

    def _all_states(self, retained: dict[str, bytes]) -> list[Message]:
        for name, payload in retained.items():
            known = _state_of(payload)
            if known is not None:
                self._records.remember_since(name, *known)
        newest = self._records.newest()
        gone = [Message(name, b"") for name in retained if name not in newest]
        return gone + [self._message(name, record) for name, record in newest.items()]

    def _message(self, name: str, record: Record | None) -> Message:
        if record is None:
            return Message(name, b"")
        expires_s = None
        if isinstance(record, JobRecord) and record.ended_at is not None:
            left_s = record.ended_at + self._config.ended_job_s - self._clock()
            expires_s = max(1, math.ceil(left_s))
        return Message(name, msgspec.json.encode(record), expires_s=expires_s)


@asynccontextmanager
async def publishing(publisher: Publisher | None) -> AsyncIterator[None]:
    """Publish while the context lasts; a failure of the publisher is logged and ends nothing."""
    if publisher is None:
        yield
        return
    running = asyncio.create_task(_run(publisher))
    leads = True
    try:
        yield
    except LeaseLostError:
        # Nothing may be sent any more. The process ends now, and the broker publishes its will.
        leads = False
        raise
    finally:
        if leads:
            await publisher.close()
            await _end({running})


async def _run(publisher: Publisher) -> None:
    try:
        await publisher.run()
    except LeaseLostError:
        LOG.info("another scheduler leads, and publishes the events")
    except Exception:
        # Events are advisory: the scheduler goes on without them.
        LOG.critical(
            "a bug in PlexRL: no events are published any more, please report it", exc_info=True
        )


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended. A second cancellation ends the wait for a broker that
    does not answer, and one that a library has lost is repeated."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=STOP_S)


def _version() -> str:
    try:
        return version("plexrl")
    except PackageNotFoundError:
        # Running from a source tree.
        return "unknown"


class _Since(msgspec.Struct):
    state: str
    since: float | None = None


def _state_of(payload: bytes) -> tuple[str, float] | None:
    """State and time of a record that the broker retains; None: it names no time. A broker keeps
    what anybody may have written."""
    try:
        known = msgspec.json.decode(payload, type=_Since)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return None if known.since is None else (known.state, known.since)
