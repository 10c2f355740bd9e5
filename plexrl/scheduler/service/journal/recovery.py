"""Restores a core from a journal: the newest snapshot and the events after it."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plexrl.errors import JournalMissingError, PlexRLError, StorageError
from plexrl.scheduler.core.advance import EVENT, Fault
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.journal.journal import Journal
from plexrl.scheduler.service.skipped_steps import SkippedSteps

LOG = logging.getLogger(__name__)

STATE_PATTERNS = ("checkpoints/*", "nodes/*/nvme/*", "blobs/*")
"""Files below `SchedulerConfig.state_dir` that exist only if a journal existed: checkpoints, model
state, payloads and results."""

PROGRESS_EVENTS = 50_000
"""Events replayed between two lines of the log."""

FAULTS_MAX = 64
"""Maximum skipped steps in one restart. Each one costs another replay, and more of them mean a
problem that skipping does not solve."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A core in its state after the event at `position`, accepted at `at`."""

    core: SchedulerCore
    position: int
    at: float
    snapshot_position: int
    """Position of the snapshot used; 0: none."""
    skipped: SkippedSteps


def restore(
    config: SchedulerConfig,
    journal: Journal,
    skipped: SkippedSteps | None = None,
    upto: int | None = None,
) -> Restored:
    """A core with all events of the journal, or with those up to position `upto`.

    Snapshots of an unknown format are ignored in favour of an older one, or of all events if none
    is missing. Steps of events that fail are skipped and recorded.

    Raises:
        StorageError: the journal cannot be read, events needed for the replay are missing, or too
            many steps fail.
        JournalMissingError: the journal is empty although there is state of former jobs.
    """
    if skipped is None:
        skipped = SkippedSteps(journal)
    with _no_collections():
        for _ in range(FAULTS_MAX):
            restored = _replay(config, journal, skipped, upto)
            if restored is not None:
                if restored.position == 0 and upto is None:
                    _check_nothing_lost(config)
                return restored
    raise StorageError(
        f"{FAULTS_MAX} steps of events in the journal failed and were skipped, and more fail: "
        "use the version of PlexRL that wrote it, or a copy of the journal from before"
    )


def _check_nothing_lost(config: SchedulerConfig) -> None:
    if not config.state_dir:
        return
    for found in (path for each in STATE_PATTERNS for path in Path(config.state_dir).glob(each)):
        raise JournalMissingError(
            f"the journal is empty, but there is state of former jobs, such as {found}: restore "
            "the journal, or start a new one with --new-journal, which drops the jobs, tenants and "
            "API keys of the former one; checkpoints are kept",
            found=str(found),
        )


def _replay(
    config: SchedulerConfig, journal: Journal, skipped: SkippedSteps, upto: int | None
) -> Restored | None:
    """One attempt of `restore`; None if a step failed, which is recorded as skipped."""
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
        steps = skipped.steps(position)
        try:
            if EVENT not in steps:
                core.handle(event, at, steps)
        except PlexRLError:
            refused += 1
        except Fault as fault:
            skipped.add(position, event, fault)
            return None
        if (position - first) % PROGRESS_EVENTS == 0:
            LOG.info("%d events replayed, up to number %d", position - first, position)
    LOG.info(
        "journal restored up to event %d: %d replayed after the snapshot at %d, of which %d were "
        "refused again",
        *(position, position - first, first, refused),
    )
    return Restored(core, position, at, first, skipped)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disable garbage collection: a replay creates millions of objects and frees none, and the
    collections would take as long as creating them."""
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
            LOG.error("the snapshot at event %d is ignored: %s", position, error)
            before = position
    return SchedulerCore(config), 0, 0.0
