"""How the history is read: the one way for lanes, for a replay under other rules, and for proofs.

`HistoryReader` reads an archive, with or without a journal that has what is not archived yet:

    reader = HistoryReader(Archive("/var/lib/plexrl/history"))
    replay = reader.replay(config, since, until)     # the core as it was just before `since`
    for entry in replay.run():                       # what happened from then on: the same again,
        ...                                          # with the core after each event
    for at, event in replay.events:                  # or the events alone, for another core
        ...

A replay begins at the newest archived snapshot before `since`, or at the beginning of the journal,
and handles the events in between. Where pieces are missing, because they were deleted by age or by
a tenant's wish, or are damaged, a replay raises `NotFoundError`; `entries` passes over them, for
readers that need single events only.

`runs` reads the runs of operations, which needs no replay, in the resolution of a screen.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from plexrl.errors import CorruptStateError, NotFoundError, PlexRLError, StorageError
from plexrl.ids import TenantId
from plexrl.scheduler.core.advance import EVENT, NONE
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.queries.overview.runs import GroupRun
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.journal.history.archive import Archive
from plexrl.scheduler.service.journal.history.event_files import (
    decode_events,
    is_continued_by,
    last_piece,
)
from plexrl.scheduler.service.journal.history.pieces import (
    EVENTS,
    RUNS,
    STATE,
    ArchivePiece,
    unseal,
)
from plexrl.scheduler.service.journal.history.run_files import decode_runs, resolution_of
from plexrl.scheduler.service.journal.journal import Journal
from plexrl.scheduler.state.messages.events import CODEC, Event

RUNS_MAX: Final = 250_000
"""Runs of one answer; the newest count."""
JOURNAL_PAGE: Final = 2000


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One event as it was accepted."""

    position: int
    at: float
    """Seconds on the scheduler's clock."""
    event: Event
    skipped: frozenset[str]
    """Steps that a replay leaves out, as the scheduler did."""


_Found = tuple[int, HistoryEntry | None]
"""(position, event); None: it is missing, and so are those before it that were not given."""


@dataclass(slots=True)
class Replay:
    """A core in its state just before a moment, and what happened from then on."""

    core: SchedulerCore
    at: float
    """Time of the last event that the core has handled; 0: it has handled none."""
    entries: Iterator[HistoryEntry]
    """To be read once."""

    @property
    def events(self) -> Iterator[tuple[float, Event]]:
        """(time, event) of `entries`. Raises `NotFoundError`."""
        return ((entry.at, entry.event) for entry in self.entries)

    def run(self) -> Iterator[HistoryEntry]:
        """The entries, each after the core has handled it."""
        for entry in self.entries:
            handle(self.core, entry)
            yield entry


@dataclass(slots=True)
class ArchivedRuns:
    """Runs that the archive has of a window."""

    runs: list[GroupRun] = field(default_factory=list)
    covered: list[tuple[float, float]] = field(default_factory=list)
    """The times of which they tell."""


class HistoryReader:
    """Reads an archive, and a journal if one is given: it has the newest events."""

    def __init__(self, archive: Archive, journal: Journal | None = None) -> None:
        self._archive, self._journal = archive, journal

    def replay(self, config: SchedulerConfig, since: float, until: float) -> Replay:
        """The core just before `since`, and the entries from then until `until`. `config` gives
        the settings of the process; the core's own are those of the history.

        Raises:
            NotFoundError: events between a snapshot and `since` are missing.
            StorageError: the archive cannot be read, or another version of PlexRL wrote it.
        """
        series, core, position, at = self._start(config, since)
        entries = self._without_gaps(series, position, until)
        first: HistoryEntry | None = None
        for entry in entries:
            if entry.at >= since:
                first = entry
                break
            handle(core, entry)
            at = entry.at
        return Replay(core, at, _joined(first, entries))

    def entries(self, since: float, until: float) -> Iterator[HistoryEntry]:
        """The known events between two times, in their order, without a core."""
        found = {piece.series for piece in self._archive.pieces(EVENTS)}
        for series in sorted(found | {self._journal_series()}):
            for _, entry in self._entries(series, 0, until, since):
                if entry is not None and entry.at >= since:
                    yield entry

    def runs(
        self, since: float, until: float, pixel_s: float, tenant: TenantId | None = None
    ) -> ArchivedRuns:
        """Runs that ended between two times, at most about `RUNS_MAX` of them, the newest. Runs
        that are less than `pixel_s` apart may be one. Of a tenant: its own only.

        Damaged pieces count as missing. Raises `StorageError`.
        """
        found, resolution = ArchivedRuns(), resolution_of(pixel_s)
        for piece in reversed(self._archive.pieces(RUNS)):
            if piece.end <= since or piece.begin >= until or len(found.runs) > RUNS_MAX:
                continue
            more = self._runs(piece, resolution, tenant)
            if more is not None:
                found.runs += more
                found.covered.append((piece.begin, piece.end))
        return found

    def _runs(
        self, piece: ArchivePiece, resolution: int, tenant: TenantId | None
    ) -> list[GroupRun] | None:
        def read(start: int, stop: int) -> bytes | None:
            return self._archive.read(piece, start, stop)

        try:
            return decode_runs(piece.name, read, resolution, tenant)
        except CorruptStateError:
            return None

    def _start(
        self, config: SchedulerConfig, since: float
    ) -> tuple[int, SchedulerCore, int, float]:
        """(series, core, position, time) of the newest snapshot before `since`."""
        newest = None if self._journal is None else self._journal.snapshot()
        if newest is not None and newest[1] < since:
            restored = SchedulerCore.restore(config, newest[2])
            return self._journal_series(), restored, newest[0], newest[1]
        pieces = self._archive.pieces(STATE, EVENTS)
        before = [piece for piece in pieces if _begins_before(piece, since)]
        series = before[-1].series if before else 0
        if self._journal is not None and self._journal_series() > series:
            rows = self._journal.rows(0, 1)
            if rows and rows[0][1] < since:
                return self._journal_series(), SchedulerCore(config), 0, 0.0
        for piece in reversed(before):
            if piece.kind != STATE or piece.series != series:
                continue
            core = self._restore(config, piece)
            if core is not None:
                return series, core, piece.last, piece.end
        return series, SchedulerCore(config), 0, 0.0

    def _restore(self, config: SchedulerConfig, piece: ArchivePiece) -> SchedulerCore | None:
        content = self._archive.read(piece)
        if content is None:
            return None
        try:
            return SchedulerCore.restore(config, unseal(piece.name, content))
        except CorruptStateError:
            return None

    def _journal_series(self) -> int:
        """The series that the journal continues, or begins."""
        pieces = self._archive.pieces()
        series = max((piece.series for piece in pieces), default=0)
        last = last_piece(pieces, EVENTS, series)
        if self._journal is None or is_continued_by(self._journal, last):
            return series
        return series + 1

    def _without_gaps(self, series: int, after: int, until: float) -> Iterator[HistoryEntry]:
        missing = after
        for position, entry in self._entries(series, after, until):
            missing = position if entry is None else position - 1
            if entry is None:
                continue
            if missing > after:
                break
            after = position
            yield entry
        if missing > after:
            raise NotFoundError(
                f"the history has no events {after + 1} to {missing}: they were deleted, damaged, "
                "or never archived; name a later time",
                first=after + 1,
                last=missing,
            )

    def _entries(
        self, series: int, after: int, until: float, since: float = 0.0
    ) -> Iterator[_Found]:
        """The events of one series after a position, then those that only the journal has."""
        pieces = self._archive.pieces(EVENTS)
        for piece in pieces:
            if piece.series != series or piece.last <= after or piece.end < since:
                continue
            if piece.begin > until:
                return
            for position, entry in self._of_piece(piece, until):
                if after < position:
                    after = position
                    yield position, entry
        if self._journal is not None and series == self._journal_series():
            yield from self._of_journal(self._journal, after, until)

    def _of_piece(self, piece: ArchivePiece, until: float) -> Iterator[_Found]:
        try:
            content = self._archive.read(piece)
            rows = None if content is None else decode_events(piece, content)
        except CorruptStateError:
            rows = None
        if rows is None:
            # Which of its events are of before `until` is in the piece alone.
            yield (piece.last if piece.end <= until else piece.first), None
            return
        for number, (at, body) in enumerate(zip(rows.times, rows.bodies, strict=True)):
            if at > until:
                return
            position = rows.first + number
            steps = frozenset(rows.skipped.get(position, ()))
            yield position, _entry(position, at, body, steps) if body else None

    def _of_journal(self, journal: Journal, after: int, until: float) -> Iterator[_Found]:
        skipped = journal.skipped_steps()
        while rows := journal.rows(after, JOURNAL_PAGE):
            for position, at, body in rows:
                if at > until:
                    return
                yield position, _entry(position, at, body, skipped.get(position, NONE))
            after = rows[-1][0]


def handle(core: SchedulerCore, entry: HistoryEntry) -> None:
    """Let the core handle an event of the history, as the scheduler did; one that was refused is
    refused again."""
    try:
        if EVENT not in entry.skipped:
            core.handle(entry.event, entry.at, entry.skipped)
    except PlexRLError:
        return


def _entry(position: int, at: float, body: str, skipped: frozenset[str]) -> HistoryEntry:
    try:
        return HistoryEntry(position, at, CODEC.decode(body), skipped)
    except ValueError as error:
        raise StorageError(
            f"event {position} of the history cannot be read: {error}: use the version of PlexRL "
            "that wrote it",
            position=position,
        ) from error


def _begins_before(piece: ArchivePiece, since: float) -> bool:
    """Whether a piece surely begins before `since`, which may be less than a millisecond later."""
    return (piece.end if piece.kind == STATE else piece.begin) < since


def _joined(first: HistoryEntry | None, rest: Iterator[HistoryEntry]) -> Iterator[HistoryEntry]:
    if first is not None:
        yield first
        yield from rest
