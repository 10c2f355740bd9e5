"""Archives what a snapshot makes unnecessary, before it is deleted from the journal.

The scheduler's turn waits for nothing here: the runs of finished operations are read from the core
in short steps, and the rest is done by a thread. Events are deleted from the journal only once the
archive has them. If it cannot be written, that is a condition of the cluster's health and is tried
again; after `HELD_EVENTS_MAX` events the journal is shortened all the same, and they are missing
from the archive: it must never stop the cluster.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from plexrl.errors import PlexRLError
from plexrl.ids import TenantId
from plexrl.process.conditions import Condition
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.queries.overview.runs import (
    OPERATIONS_PER_STEP,
    GroupRun,
    finished_operations,
    group_runs,
    oldest_index,
)
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.journal.history.archive import Archive, KeptHistory, expired
from plexrl.scheduler.service.journal.history.event_files import (
    encode_events,
    is_continued_by,
    last_piece,
)
from plexrl.scheduler.service.journal.history.pieces import (
    EVENTS,
    RUNS,
    STATE,
    ArchivePiece,
    new_piece,
    seal,
)
from plexrl.scheduler.service.journal.history.reading import ArchivedRuns, HistoryReader
from plexrl.scheduler.service.journal.history.run_files import encode_runs
from plexrl.scheduler.service.journal.journal import Journal, Row

LOG = logging.getLogger(__name__)

Result = TypeVar("Result")

PIECE_EVENTS: Final = 20_000
"""Events of one piece, about 1 MiB."""
ROWS_PER_READ: Final = 500
"""Events that are read from the journal at a time; an append waits for that."""
HELD_EVENTS_MAX: Final = 1_000_000
"""Events that the journal keeps for an archive that cannot be written."""
RETRY_S: Final = 60.0
STALLED_S: Final = 300.0
"""An archive that has not answered for so long is named: a mount may hang rather than fail."""
BEHIND: Final = "history_behind"
"""Code of the condition."""


def history_writer(
    config: SchedulerConfig, journal: Journal, core: Callable[[], SchedulerCore], position: int
) -> "HistoryWriter | None":
    """The writer that `config` asks for; None: nothing is archived. `position`: of the last event
    that the core has handled."""
    if not config.archive_url or not config.archive_days:
        return None
    kept = KeptHistory(days=config.archive_days, bytes_max=config.archive_bytes_max)
    return HistoryWriter(Archive(config.archive_url), kept, journal, core, position=position)


class HistoryWriter:
    """Writes the archive of one journal. `position` and `operations`: how far the core was when
    this process began to lead."""

    def __init__(
        self,
        archive: Archive,
        kept: KeptHistory,
        journal: Journal,
        core: Callable[[], SchedulerCore],
        *,
        position: int,
        retry_s: float = RETRY_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        self.archive = archive
        self._kept, self._journal, self._core = kept, journal, core
        self._start = position, core().cluster.state.finished_count
        self._retry_s, self._stalled_s = retry_s, stalled_s
        self._wanted = asyncio.Event()
        # Also what a former process left to do.
        self._wanted.set()
        self._reading = asyncio.Lock()
        self._series: int | None = None
        self._archived = 0
        self._failure: tuple[float, str] | None = None
        self._pending: tuple[float, float] | None = None
        """When a call of the archive began that has not ended: since the epoch, and monotonic."""

    def notify(self) -> None:
        """There is a new snapshot."""
        self._wanted.set()

    def deletable(self, position: int) -> int | None:
        """The last event that the journal may delete after a snapshot at `position`; None: no
        bound."""
        behind = position - max(self._archived, self._start[0])
        return None if behind > HELD_EVENTS_MAX else self._archived

    def condition(self) -> Condition | None:
        """What is wrong; None: nothing is."""
        failure = self._failure or self._stall()
        if failure is None:
            return None
        since, message = failure
        text = f"the history is not archived, and kept in the journal meanwhile: {message}"
        return Condition(code=BEHIND, message=text, since=since)

    def _stall(self) -> tuple[float, str] | None:
        if self._pending is None:
            return None
        since, began_at = self._pending
        pending_s = time.monotonic() - began_at
        if pending_s < self._stalled_s:
            return None
        return since, (
            f"the archive {self.archive.location} has not answered for {pending_s:.0f} s: check "
            "its disk or mount"
        )

    async def runs(
        self, since: float, until: float, pixel_s: float, tenant: TenantId | None
    ) -> ArchivedRuns:
        """As `HistoryReader.runs`, one call at a time: also one that nobody awaits any more ends
        before the next begins, so that an archive that hangs holds one thread."""
        await self._reading.acquire()
        read = partial(HistoryReader(self.archive).runs, since, until, pixel_s, tenant)
        reading = asyncio.ensure_future(_in_thread(read))
        reading.add_done_callback(self._end_reading)
        return await asyncio.shield(reading)

    def _end_reading(self, reading: asyncio.Future[ArchivedRuns]) -> None:
        self._reading.release()
        if not reading.cancelled():
            # Nobody may await it any more.
            reading.exception()

    async def run(self) -> None:
        """Archive after each snapshot, and again after failures, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.archive_now()
            except Exception as error:
                # Also of a bug: the archive may fail, but the cluster goes on.
                self._failed(error)
                asyncio.get_running_loop().call_later(self._retry_s, self._wanted.set)
            else:
                self._failure = None

    async def archive_now(self) -> None:
        """Archive up to the newest snapshot. Raises `PlexRLError`; what is done stays done."""
        if self._series is None:
            await self._ask(self._begin)
        await self._archive_runs()
        await self._ask(self._archive_events)

    async def _ask(self, work: Callable[[], Result]) -> Result:
        """Result of calls of the archive, made by a thread."""
        self._pending = time.time(), time.monotonic()
        try:
            return await _in_thread(work)
        finally:
            self._pending = None

    def _failed(self, error: Exception) -> None:
        since = time.time() if self._failure is None else self._failure[0]
        if isinstance(error, PlexRLError):
            LOG.error("the history is not archived yet: %s", error)
        else:
            LOG.error("the history is not archived: please report this bug", exc_info=error)
        text = error.message if isinstance(error, PlexRLError) else repr(error)
        self._failure = since, text

    def _begin(self) -> None:
        """Find where the archive ends. One that is ahead of the journal, or ends with another
        event than the journal has there, is another journal's."""
        self.archive.clean()
        pieces = self.archive.pieces()
        last = max((piece.series for piece in pieces), default=0)
        own = [piece for piece in pieces if piece.series == last]
        events, operations = _end(own, EVENTS), _end(own, RUNS)
        is_ahead = events > self._start[0] or operations > self._start[1]
        if is_ahead or not is_continued_by(self._journal, last_piece(own, EVENTS, last)):
            last, events = last + 1, 0
        self._archived, self._series = events, last

    async def _archive_runs(self) -> None:
        pieces = await self._ask(partial(self._pieces, RUNS))
        after = max(_end(pieces, RUNS), oldest_index(self._core().cluster.state) - 1)
        runs, first = [], after + 1
        while after < (last := self._core().cluster.state.finished_count):
            count = min(OPERATIONS_PER_STEP, last - after)
            runs += self._some_runs(after, count)
            after += count
            await asyncio.sleep(0)
        if runs:
            follows = bool(pieces) and pieces[-1].last == first - 1
            since = pieces[-1].end if follows else min(run.end for run in runs)
            await self._ask(partial(self._save_runs, runs, first, after, since))

    def _some_runs(self, after: int, count: int) -> list[GroupRun]:
        state = self._core().cluster.state
        return [
            run
            for operation in finished_operations(state, after, count)
            for run in group_runs(state, operation, operation.finished_at or 0.0)
        ]

    def _save_runs(self, runs: Sequence[GroupRun], first: int, last: int, since: float) -> None:
        until = max(run.end for run in runs)
        piece = self._new(RUNS, first, last, since, until)
        self._store(piece, encode_runs(piece.name, runs))

    def _archive_events(self) -> None:
        """Store the events up to the newest snapshot, then the snapshot if it is due, then delete
        them from the journal."""
        newest = self._journal.snapshot()
        if newest is None or newest[0] <= self._archived:
            return
        position, at, body = newest
        while self._archived < position:
            rows = self._rows(position)
            if not rows:
                break
            piece, content = encode_events(self._number, rows, self._journal.skipped_steps())
            self._store(piece, content)
            self._archived = piece.last
            # It answers, however many pieces there are.
            self._pending = time.time(), time.monotonic()
        self._store_state(position, at, body)
        self._journal.compact(2, self._archived)

    def _rows(self, position: int) -> list[Row]:
        """The next events up to `position`, without gaps, for one piece."""
        rows: list[Row] = []
        after = self._archived
        while len(rows) < PIECE_EVENTS:
            more = [row for row in self._journal.rows(after, ROWS_PER_READ) if row[0] <= position]
            whole = [row for number, row in enumerate(more) if row[0] == more[0][0] + number]
            if not whole or (rows and whole[0][0] != after + 1):
                return rows
            rows += whole
            after = whole[-1][0]
            if len(whole) < len(more):
                return rows
        return rows

    def _store_state(self, position: int, at: float, body: bytes) -> None:
        """Store the snapshot, unless the events since the last one are fewer bytes: states take at
        most half of the archive, and a replay reads at most twice what it needs."""
        pieces = self._pieces()
        states = [piece for piece in pieces if piece.kind == STATE]
        piece = self._new(STATE, position, position, at, at)
        content = seal(piece.name, body)
        since = states[-1].first if states else 0
        events = [each.nbytes for each in pieces if each.kind == EVENTS and each.first > since]
        if not states or sum(events) >= len(content):
            self._store(piece, content)

    def _store(self, piece: ArchivePiece, content: bytes) -> None:
        """Store a piece within the bounds; one that is larger than all of them is left out."""
        if len(content) > self._kept.bytes_max:
            LOG.error("%s has %d bytes: archive_bytes_max is less", piece.name, len(content))
            return
        pieces = self.archive.pieces()
        self.archive.delete(expired(pieces, self._kept, piece.end, len(content)))
        self.archive.write(piece, content)

    def _pieces(self, *kinds: str) -> list[ArchivePiece]:
        return [each for each in self.archive.pieces(*kinds) if each.series == self._series]

    @property
    def _number(self) -> int:
        assert self._series is not None, "the archive was listed"
        return self._series

    def _new(self, kind: str, first: int, last: int, begin: float, end: float) -> ArchivePiece:
        return new_piece(kind, self._number, first, last, begin, end)


def _end(pieces: Sequence[ArchivePiece], kind: str) -> int:
    """The last position or index that pieces of one kind have; 0: there is none."""
    return max((piece.last for piece in pieces if piece.kind == kind), default=0)


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Do `work` in a thread that no end of the process waits for: a mount may hang."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # None only if `work` returns it

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        # The loop may be closed by now.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="history", daemon=True).start()
    return await done
