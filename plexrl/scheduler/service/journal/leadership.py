"""Leader election: one scheduler leads, others stand by. Takes the lease, renews it, and stops at
once when it is lost.

The lease alone is not safe: a suspended scheduler still believes that it leads when it wakes.
Safety comes from the journal: every write checks the epoch of the lease, and nothing is done before
it is written. This module decides only how soon a standby takes over, and that a scheduler that
lost its lease sends nothing to any peer.

A lease is lost when another scheduler has taken it, which raises the epoch. It is not lost if it
could not be renewed in time, which also happens under load or while the database does not answer. A
lease that expired and that no scheduler took is renewed with its old epoch.
"""

import asyncio
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from plexrl.errors import (
    JournalFullError,
    JournalUnavailableError,
    LeaseHeldError,
    LeaseLostError,
    StorageError,
)
from plexrl.events.publisher import Publisher, publishing
from plexrl.process.garbage_collection import freeze_existing_objects
from plexrl.scheduler.queries.event_records import prefetch_hints
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.holding_server import HoldingServer
from plexrl.scheduler.service.journal.history.writer import history_writer
from plexrl.scheduler.service.journal.journal import Journal
from plexrl.scheduler.service.journal.recovery import restore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.service.listeners import Listeners
from plexrl.scheduler.service.service import Service
from plexrl.scheduler.service.shell import Clock, Shell
from plexrl.wire.links.address import UnixAddress, parse_address

LOG = logging.getLogger(__name__)

RENEWALS = 3
"""Renewals within the time of one lease."""

POLL_S_MAX = 1.0
"""Interval at which a standby checks the lease."""


HELD = (JournalFullError, JournalUnavailableError)
"""Errors of the journal that may end by themselves, or once an operator frees space."""


@dataclass(slots=True)
class Lead:
    """What this process knows about its lead."""

    confirmed_at: float = -math.inf
    """Monotonic time just before the last transaction in which the journal confirmed it."""


async def run_scheduler(
    config: SchedulerConfig, ready: Callable[[list[str]], None], stop: asyncio.Event
) -> None:
    """Stand by until this scheduler leads, then serve until `stop`; calls `ready` with the
    addresses once it listens.

    While the journal is full or does not answer, the scheduler holds: it listens, and answers every
    call with the reason.

    Raises:
        LeaseLostError: another scheduler leads. The caller must end the process at once: a thread
            may still be writing, which the journal will refuse.
        StorageError: the journal cannot be used.
    """
    listeners = Listeners(config)
    listening = _ListeningSocket(_socket_path(config), lambda: ready(listeners.addresses))
    holding = HoldingServer(listeners, listening.on_listening)
    lead = Lead()
    try:
        journal = await _take_lead(config, holding, lead, stop)
        if journal is None:
            return
        # Renewed during the replay too, which may take longer than a lease lasts.
        keeping = asyncio.create_task(
            keep_lead(journal, config.lease_s, listening.is_replaced, lead)
        )
        serving = asyncio.create_task(
            _serve(config, journal, holding, listeners, listening.on_listening, lead, stop)
        )
        await asyncio.wait({keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        try:
            serving.result()
        except LeaseLostError:
            raise
        except BaseException:
            await asyncio.to_thread(_release_and_close, journal)
            raise
        await asyncio.to_thread(_release_and_close, journal)
    finally:
        await holding.close()


def holder_of(config: SchedulerConfig) -> str:
    """The name of this scheduler in the lease."""
    return config.holder or f"{socket.gethostname()}:{_socket_path(config) or config.listen[0]}"


def _socket_path(config: SchedulerConfig) -> str | None:
    """The first Unix socket that the scheduler listens on, if any."""
    found = [parse_address(text) for text in config.listen]
    return next((each.path for each in found if isinstance(each, UnixAddress)), None)


async def keep_lead(
    journal: Journal,
    ttl_s: float,
    is_replaced: Callable[[], bool] = lambda: False,
    lead: Lead | None = None,
) -> NoReturn:
    """Renew a lease of `ttl_s` seconds until it is lost, in a thread of its own, so that neither
    the event loop nor its thread pool can delay it. `is_replaced`: whether another scheduler
    listens at this one's address; checked while the journal does not answer. `lead` is told when
    the journal has confirmed the lead.

    Raises:
        LeaseLostError: another scheduler took the lease.
    """
    known = lead or Lead()
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[NoReturn] = loop.create_future()
    ended = threading.Event()

    def report_loss(error: BaseException) -> None:
        if not lost.done():
            lost.set_exception(error)

    def renew() -> None:
        try:
            _renew_until(journal, ttl_s, is_replaced, known, ended)
        except BaseException as error:
            if not ended.is_set():
                loop.call_soon_threadsafe(report_loss, error)

    threading.Thread(target=renew, name="lease", daemon=True).start()
    try:
        await lost
    finally:
        ended.set()
    raise AssertionError("a lease that is not lost is renewed")


def _renew_until(
    journal: Journal,
    ttl_s: float,
    is_replaced: Callable[[], bool],
    lead: Lead,
    ended: threading.Event,
) -> None:
    renewed_at = time.monotonic()
    has_warned = False
    while not ended.wait(ttl_s / RENEWALS):
        began_at = time.monotonic()
        try:
            journal.renew()
        except LeaseLostError as error:
            silence_s = time.monotonic() - renewed_at
            raise LeaseLostError(
                f"{error.message}; it was last renewed {silence_s:.1f} s ago and lasts {ttl_s:g} s",
                **error.details,
            ) from error
        except JournalFullError:
            # The transaction found the lease still ours, and no other scheduler can write either.
            failure = None
        except StorageError as error:
            failure = error
        else:
            failure = None
        now = time.monotonic()
        overdue_s = now - renewed_at - ttl_s
        if failure is None:
            lead.confirmed_at = began_at
            if overdue_s > 0:
                LOG.warning(
                    "the lease of %g s had expired %.1f s ago and no scheduler had taken it; it is "
                    "ours again (this process did not try for %.1f s, the journal took %.1f s)",
                    *(ttl_s, overdue_s, began_at - renewed_at, now - began_at),
                )
            renewed_at, has_warned = began_at, False
        elif is_replaced():
            raise LeaseLostError(
                f"the lease could not be renewed for {now - renewed_at:.1f} s ({failure}), and "
                "another scheduler listens at this address: it leads"
            )
        elif overdue_s > 0 and not has_warned:
            LOG.warning(
                "the lease of %g s has expired: it could not be renewed (%s). Nothing is written "
                "unless it is still ours; retrying",
                *(ttl_s, failure),
            )
            has_warned = True


class _ListeningSocket:
    """Detects whether another process has replaced the listening socket."""

    def __init__(self, path: str | None, ready: Callable[[], None]) -> None:
        """`path`: None if there are TLS ports only, which two processes never share."""
        self._path = None if path is None else Path(path)
        self._ready: Callable[[], None] | None = ready
        self._identity: tuple[int, int] | None = None

    def on_listening(self) -> None:
        """The socket listens; calls `ready` the first time."""
        self._identity = self._stat()
        if self._ready is not None:
            self._ready()
            self._ready = None

    def is_replaced(self) -> bool:
        """Whether another process listens there."""
        found = self._stat()
        return self._identity is not None and found is not None and found != self._identity

    def _stat(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


async def _take_lead(
    config: SchedulerConfig, holding: HoldingServer, lead: Lead, stop: asyncio.Event
) -> SqlJournal | None:
    """Open the journal and wait for its lease; None if `stop` came first."""
    poll_s = min(config.lease_s / RENEWALS, POLL_S_MAX)
    holder, journal, is_standby = holder_of(config), None, False
    while not stop.is_set():
        try:
            if journal is None:
                journal = await asyncio.to_thread(
                    SqlJournal, config.journal, config.journal_bytes_max
                )
            began_at = time.monotonic()
            epoch = await asyncio.to_thread(journal.acquire, holder, config.lease_s)
        except LeaseHeldError as error:
            await holding.close()
            if not is_standby:
                LOG.info("standing by: %s", error)
            is_standby = True
        except StorageError as error:
            if isinstance(error, HELD):
                await holding.hold(error)
            elif is_standby:
                LOG.warning("standing by: %s", error)
            else:
                raise
        else:
            LOG.info("%s leads, epoch %d", holder, epoch)
            lead.confirmed_at = began_at
            return journal
        await _pause(poll_s, stop)
    if journal is not None:
        await asyncio.to_thread(journal.close)
    return None


async def _pause(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


async def _serve(
    config: SchedulerConfig,
    journal: Journal,
    holding: HoldingServer,
    listeners: Listeners,
    ready: Callable[[], None],
    lead: Lead,
    stop: asyncio.Event,
) -> None:
    while True:
        try:
            restored = await asyncio.to_thread(restore, config, journal)
            break
        except HELD as error:
            await holding.hold(error)
        await _pause(POLL_S_MAX, stop)
        if stop.is_set():
            return
    shell = Shell(
        restored.core,
        journal,
        Clock(restored.at),
        position=restored.position,
        snapshot_position=restored.snapshot_position,
        snapshot_events=config.snapshot_events,
        skipped=restored.skipped,
    )
    freeze_existing_objects()
    service = Service(config, shell, listeners, lambda: lead.confirmed_at)
    shell.history = history_writer(config, journal, lambda: shell.core, restored.position)
    if shell.history is not None:
        service.keep(shell.history.run())
    async with publishing(_publisher(config, shell)):
        await service.run(ready, stop, holding)
    await shell.save()


def _publisher(config: SchedulerConfig, shell: Shell) -> Publisher | None:
    """What publishes the cluster's events; None if no broker is configured."""
    if config.events is None:
        return None
    publisher = Publisher(
        config.events,
        shell.core.records(config.events.ended_job_s),
        shell.clock.now,
        holder_of(config),
        shell.wait_until_consistent,
        shell.confirm_lead,
    )
    shell.on_change = lambda commands: publisher.notify(prefetch_hints(commands, shell.clock.now()))
    shell.event_status = publisher.broker.view
    return publisher


def _release_and_close(journal: Journal) -> None:
    try:
        journal.release()
    except StorageError as error:
        LOG.warning("the lease was not released and will expire: %s", error)
    journal.close()
