"""What a journal holds, as a core again: the newest snapshot and the events behind it."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plexrl.errors import JournalMissingError, PlexRLError, StorageError
from plexrl.scheduler.config import SchedulerConfig
from plexrl.scheduler.core.advance import EVENT, Fault
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.journal.journal import Journal
from plexrl.scheduler.service.set_aside import SetAside

LOG = logging.getLogger(__name__)

STATE = ("checkpoints/*", "nodes/*/nvme/*", "blobs/*")
"""What only a journal explains, below `SchedulerConfig.state_dir`: checkpoints, models' state,
payloads and results."""

PROGRESS_EVENTS = 50_000
"""Replayed between two lines of the log."""

FAULTS_MAX = 64
"""Faults met in one restart, after each of which all is replayed again: with more than that,
something is wrong that leaving events out does not mend."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A core as it was after the event at `position`, accepted at `at`."""

    core: SchedulerCore
    position: int
    at: float
    snapshot_position: int
    """Of the snapshot it was made from; 0: from nothing."""
    aside: SetAside
    """What is left out of replays."""


def restore(
    config: SchedulerConfig,
    journal: Journal,
    aside: SetAside | None = None,
    upto: int | None = None,
) -> Restored:
    """A core with everything the journal holds, or with all up to position `upto`.

    A snapshot of a format that is not known here is passed over for an older one, or for all events
    from the first, as far as they are still there. Steps of events that fail are set aside.

    Raises:
        StorageError: the journal cannot be read, or not without what it has forgotten, or one event
            after the other fails.
        JournalMissingError: it is empty although there is state that a journal explained.
    """
    if aside is None:
        aside = SetAside(journal)
    with _no_collections():
        for _ in range(FAULTS_MAX):
            restored = _restore(config, journal, aside, upto)
            if restored is not None:
                if restored.position == 0 and upto is None:
                    _check_nothing_lost(config)
                return restored
    raise StorageError(
        f"{FAULTS_MAX} steps of events in the journal have failed and were set aside, and still "
        "more fail: use the version of PlexRL that wrote it, or a copy of the journal from before"
    )


def _check_nothing_lost(config: SchedulerConfig) -> None:
    if not config.state_dir:
        return
    for found in (path for each in STATE for path in Path(config.state_dir).glob(each)):
        raise JournalMissingError(
            f"the journal is empty, but there is state of former jobs, such as {found}: bring "
            "the journal back, or begin a new one with --new-journal, which gives up the jobs, "
            "tenants and API keys that the former one knew; checkpoints are kept",
            found=str(found),
        )


def _restore(
    config: SchedulerConfig, journal: Journal, aside: SetAside, upto: int | None
) -> Restored | None:
    """As `restore`; None where a step failed, which is set aside now."""
    core, position, at = _from_snapshot(config, journal)
    first, refused = position, 0
    for found, event, found_at in journal.read(after=position):
        if upto is not None and found > upto:
            break
        if found != position + 1:
            raise StorageError(
                f"the journal holds no events {position + 1} to {found - 1}, and no snapshot after "
                "them can be read: use the version of PlexRL that wrote it, or a copy of the "
                "journal from before",
                position=position + 1,
            )
        position, at = found, found_at
        skipped = aside.steps(position)
        try:
            if EVENT not in skipped:
                core.handle(event, at, skipped)
        except PlexRLError:
            refused += 1
        except Fault as fault:
            aside.add(position, event, fault)
            return None
        if (position - first) % PROGRESS_EVENTS == 0:
            LOG.info("%d events replayed, up to number %d", position - first, position)
    LOG.info(
        "journal restored up to event %d: %d replayed behind the snapshot at %d, %d of them "
        "refused as before",
        *(position, position - first, first, refused),
    )
    return Restored(core, position, at, first, aside)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Millions of objects are made and none given up: walking them again and again finds nothing
    and takes as long as making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _from_snapshot(config: SchedulerConfig, journal: Journal) -> tuple[SchedulerCore, int, float]:
    before = None
    while (found := journal.snapshot(before)) is not None:
        position, at, body = found
        try:
            return SchedulerCore.restore(config, body), position, at
        except PlexRLError as error:
            LOG.error("the snapshot at event %d is passed over: %s", position, error)
            before = position
    return SchedulerCore(config), 0, 0.0
