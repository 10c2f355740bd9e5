"""One scheduler leads, others stand by: take the lease, keep it, and stop at once when it is lost.

The lease alone makes nothing safe: a scheduler that was suspended for a minute believes in its own
when it wakes. What makes it safe is that every write to the journal checks the lease's epoch, and
that nothing is done before it is written. So all that is decided here is how soon another takes
over, and that a scheduler that knows it has lost says nothing more to anybody.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from plexrl.errors import JournalFullError, LeaseHeldError, LeaseLostError, StorageError
from plexrl.garbage_collection import spare_living
from plexrl.scheduler.config import SchedulerConfig
from plexrl.scheduler.journal import Journal
from plexrl.scheduler.recovery import restore
from plexrl.scheduler.service import Service
from plexrl.scheduler.shell import Clock, Shell
from plexrl.scheduler.sql_journal import SqlJournal

LOG = logging.getLogger(__name__)

RENEWALS = 3
"""Tries to renew in the time of one lease."""

POLL_S_MAX = 1.0
"""Between two looks of a standby at the lease."""


async def run_scheduler(
    config: SchedulerConfig, ready: Callable[[], None], stop: asyncio.Event
) -> None:
    """Stand by until this scheduler leads, then serve until `stop`; `ready` is called in between.

    Raises:
        LeaseLostError: another leads, or may. The caller must end the process at once: a write of
            before may still be under way in a thread, which the journal will refuse.
        StorageError: the journal cannot be used.
    """
    journal = await asyncio.to_thread(SqlJournal, config.journal, config.journal_bytes_max)
    led_since = await _take_lead(journal, holder_of(config), config.lease_s, stop)
    if led_since is None:
        await asyncio.to_thread(journal.close)
        return
    # Kept while the journal is replayed as well: that may take longer than a lease lasts.
    keeping = asyncio.create_task(keep_lead(journal, config.lease_s, led_since))
    serving = asyncio.create_task(_serve(config, journal, ready, stop))
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
        await asyncio.to_thread(_give_up, journal)
        raise
    await asyncio.to_thread(_give_up, journal)


def holder_of(config: SchedulerConfig) -> str:
    """The name under which this scheduler leads."""
    return config.holder or f"{socket.gethostname()}:{Path(config.listen).absolute()}"


async def keep_lead(journal: Journal, ttl_s: float, led_since: float) -> NoReturn:
    """Renew a lease of `ttl_s` seconds, taken at `led_since` by the event loop's clock, until it is
    lost.

    Raises:
        LeaseLostError: another took it, or it could not be renewed in its time.
    """
    clock = asyncio.get_running_loop().time
    # Counted from before each call: by the database's clock the lease lasts at least as long.
    renewed_at = led_since
    failure: Exception | None = None
    while True:
        await asyncio.sleep(ttl_s / RENEWALS)
        began_at = clock()
        try:
            async with asyncio.timeout_at(renewed_at + ttl_s):
                await asyncio.to_thread(journal.renew)
            renewed_at = began_at
        except LeaseLostError:
            raise
        except JournalFullError:
            # The lease was still ours in this very transaction; nobody else can write either.
            renewed_at = began_at
        except (StorageError, TimeoutError) as error:
            failure = error
            LOG.warning("the lease could not be renewed: %s", error or "no answer in its time")
        if clock() >= renewed_at + ttl_s:
            raise LeaseLostError(
                f"the lease could not be renewed for {ttl_s:g} s, so that another scheduler may "
                "lead by now: check the journal's database"
            ) from failure


async def _take_lead(
    journal: Journal, holder: str, ttl_s: float, stop: asyncio.Event
) -> float | None:
    """Wait for the lease: the loop's time before it was taken, or None where `stop` came first."""
    poll_s = min(ttl_s / RENEWALS, POLL_S_MAX)
    standing_by = False
    while not stop.is_set():
        began_at = asyncio.get_running_loop().time()
        try:
            epoch = await asyncio.to_thread(journal.acquire, holder, ttl_s)
        except LeaseHeldError as error:
            if not standing_by:
                LOG.info("standing by: %s", error)
            standing_by = True
        except StorageError as error:
            if not standing_by:
                raise
            LOG.warning("standing by: %s", error)
        else:
            LOG.info("%s leads, epoch %d", holder, epoch)
            return began_at
        try:
            async with asyncio.timeout(poll_s):
                await stop.wait()
        except TimeoutError:
            continue
    return None


async def _serve(
    config: SchedulerConfig, journal: Journal, ready: Callable[[], None], stop: asyncio.Event
) -> None:
    restored = await asyncio.to_thread(restore, config, journal)
    shell = Shell(
        restored.core,
        journal,
        Clock(restored.at),
        position=restored.position,
        snapshot_position=restored.snapshot_position,
        snapshot_events=config.snapshot_events,
        aside=restored.aside,
    )
    spare_living()
    await Service(config, shell).run(ready, stop)
    await shell.save()


def _give_up(journal: Journal) -> None:
    try:
        journal.release()
    except StorageError as error:
        LOG.warning("the lease was not released and will expire: %s", error)
    journal.close()
