"""The journal in SQLite or PostgreSQL, by SQLAlchemy Core.

This module assigns positions, without gaps, because the database would restart at 1 after all
events were compacted. Only the holder of the lease assigns positions.

A commit without an answer may have succeeded. Its callers received an error, and the core never
handled its events. So the next append deletes, in its transaction, all events after the last
confirmed position.
"""

import hashlib
import logging
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from plexrl.errors import (
    JournalUnavailableError,
    LeaseHeldError,
    LeaseLostError,
    StorageError,
)
from plexrl.scheduler.service.journal.database import open_database, translate
from plexrl.scheduler.service.journal.journal import Entry, Row
from plexrl.scheduler.service.journal.schema import (
    EVENTS,
    LEASE,
    LEASES,
    SET_ASIDE,
    SNAPSHOTS,
    migrate,
)
from plexrl.scheduler.state.messages.events import CODEC, Event

LOG = logging.getLogger(__name__)

READ_PAGE = 4096
"""Events read in one transaction."""

COMPACT_PAGE = 5000
"""Events deleted in one transaction, for which appends and renewals of the lease wait."""

_HEAD = struct.Struct("<qd")


class SqlJournal:
    """A `Journal` in the database that `journal` (a path or a URL) names.

    `bytes_max`: maximum size of an SQLite file; None: limited by the disk. Opening migrates the
    schema.

    Raises:
        StorageError: the database cannot be opened, or a newer version wrote it.
        InvalidRequestError: `journal` names no supported database.
    """

    def __init__(self, journal: str, bytes_max: int | None = None) -> None:
        self._database = open_database(journal, bytes_max)
        # The lease has its own connection, so that a long transaction cannot delay its renewal.
        self._lease_database = open_database(journal, bytes_max)
        self._lock = threading.Lock()
        self._lease_lock = threading.Lock()
        self._closed = False
        self._holder = ""
        self._ttl_s = 0.0
        self._epoch: int | None = None
        self._last = 0
        self._in_doubt = False
        try:
            with self._transaction() as connection:
                migrate(self._database, connection)
        except BaseException:
            self._database.engine.dispose()
            self._lease_database.engine.dispose()
            raise

    def acquire(self, holder: str, ttl_s: float) -> int:
        """Take the lease. Raises as `Journal.acquire`."""
        clock = self._database.now().label("now")
        with self._transaction() as connection:
            row = connection.execute(
                sa.select(LEASES, clock).where(LEASES.c.name == LEASE).with_for_update()
            ).one()
            if row.holder != holder and row.expires_at > row.now:
                raise LeaseHeldError(
                    f"the journal {self._database.name} is led by {row.holder!r}: wait until it "
                    "ends, or end it",
                    holder=row.holder,
                    expires_in_s=row.expires_at - row.now,
                )
            epoch = int(row.epoch) + 1
            connection.execute(
                sa.update(LEASES)
                .where(LEASES.c.name == LEASE)
                .values(holder=holder, epoch=epoch, expires_at=row.now + ttl_s)
            )
            last = max(
                connection.execute(sa.select(sa.func.max(table.c.position))).scalar() or 0
                for table in (EVENTS, SNAPSHOTS)
            )
        self._holder, self._ttl_s, self._epoch, self._last = holder, ttl_s, epoch, last
        self._in_doubt = False
        return epoch

    def renew(self) -> None:
        """Extend the lease. Raises as `Journal.renew`."""
        with self._transaction(of_lease=True) as connection:
            self._check_lease(connection)
            connection.execute(
                sa.update(LEASES)
                .where(LEASES.c.name == LEASE)
                .values(expires_at=self._database.now() + self._ttl_s)
            )

    def release(self) -> None:
        """Let another scheduler take the lease at once."""
        with self._transaction() as connection:
            connection.execute(
                sa.update(LEASES)
                .where(LEASES.c.name == LEASE, LEASES.c.epoch == self._epoch)
                .values(expires_at=0.0)
            )
        self._epoch = None

    def append(self, entries: Sequence[Entry]) -> int:
        """Append all entries durably, or none. Raises as `Journal.append`."""
        bodies = [(at, CODEC.encode(event).decode()) for event, at in entries]
        with self._transaction() as connection:
            self._check_lease(connection)
            first = self._last + 1
            if self._in_doubt:
                connection.execute(sa.delete(EVENTS).where(EVENTS.c.position >= first))
            # Set before the commit: only its confirmation ends the doubt.
            self._in_doubt = True
            if bodies:
                rows = [(first + index, at, body) for index, (at, body) in enumerate(bodies)]
                self._database.insert(connection, rows)
        self._in_doubt = False
        self._last += len(bodies)
        return self._last

    def read(self, after: int = 0) -> Iterator[tuple[int, Event, float]]:
        """Every stored event after `after`, oldest first.

        Raises:
            StorageError: an event cannot be decoded.
        """
        while True:
            rows = self.rows(after, READ_PAGE)
            for position, at, body in rows:
                try:
                    event = CODEC.decode(body)
                except ValueError as error:
                    raise StorageError(
                        f"event {position} of the journal {self._database.name} cannot be read: "
                        f"{error}: use the version of PlexRL that wrote it",
                        position=position,
                    ) from error
                yield position, event, at
            if len(rows) < READ_PAGE:
                return
            after = rows[-1][0]

    def rows(self, after: int, count: int) -> list[Row]:
        """Some stored events, oldest first."""
        page = (
            sa.select(EVENTS)
            .where(EVENTS.c.position > after)
            .order_by(EVENTS.c.position)
            .limit(count)
        )
        with self._transaction() as connection:
            found = connection.execute(page).all()
        return [(row.position, row.at, row.body) for row in found]

    def write_snapshot(self, position: int, at: float, body: bytes) -> None:
        """Store a snapshot. Raises as `Journal.append`."""
        # Field names repeat, so even level 1 compresses to a fifth.
        body = zlib.compress(body, level=1)
        digest = _digest(position, at, body)
        with self._transaction() as connection:
            self._check_lease(connection)
            # The limit applies to events only: a snapshot is needed to free space when it is
            # reached.
            self._database.lift_size_limit(connection)
            try:
                connection.execute(sa.delete(SNAPSHOTS).where(SNAPSHOTS.c.position == position))
                connection.execute(
                    sa.insert(SNAPSHOTS).values(position=position, at=at, digest=digest, body=body)
                )
            finally:
                self._database.set_size_limit(connection)

    def snapshot(self, before: int | None = None) -> tuple[int, float, bytes] | None:
        """The newest intact snapshot; with `before`: at a lower position."""
        newest = sa.select(SNAPSHOTS).order_by(SNAPSHOTS.c.position.desc()).limit(1)
        while True:
            wanted = newest if before is None else newest.where(SNAPSHOTS.c.position < before)
            with self._transaction() as connection:
                row = connection.execute(wanted).one_or_none()
            if row is None:
                return None
            if row.digest == _digest(row.position, row.at, row.body):
                return row.position, row.at, zlib.decompress(row.body)
            LOG.error("the snapshot at event %d is damaged; trying the previous one", row.position)
            before = row.position

    def compact(self, kept_snapshots: int = 2, upto: int | None = None) -> None:
        """Delete what the newest snapshots make unnecessary. Raises as `Journal.append`."""
        newest = (
            sa.select(SNAPSHOTS.c.position)
            .order_by(SNAPSHOTS.c.position.desc())
            .limit(kept_snapshots)
        )
        oldest = sa.select(sa.func.min(EVENTS.c.position))
        while True:
            with self._transaction() as connection:
                self._check_lease(connection)
                kept = connection.execute(newest).scalars().all()
                first = connection.execute(oldest).scalar()
                if len(kept) < kept_snapshots:
                    return
                end = kept[-1] if upto is None else min(kept[-1], upto)
                last = end if first is None else min(end, first + COMPACT_PAGE)
                connection.execute(sa.delete(EVENTS).where(EVENTS.c.position <= last))
                connection.execute(sa.delete(SNAPSHOTS).where(SNAPSHOTS.c.position < kept[-1]))
            if last == end:
                return

    def skip_step(self, position: int, step: str, error: str) -> None:
        """Record a skipped step. Raises as `Journal.append`."""
        with self._transaction() as connection:
            self._check_lease(connection)
            same = (SET_ASIDE.c.position == position) & (SET_ASIDE.c.step == step)
            connection.execute(sa.delete(SET_ASIDE).where(same))
            row = {"position": position, "step": step, "error": error}
            connection.execute(sa.insert(SET_ASIDE).values(row))

    def skipped_steps(self) -> dict[int, frozenset[str]]:
        """The skipped steps of events, by position."""
        with self._transaction() as connection:
            rows = connection.execute(sa.select(SET_ASIDE.c.position, SET_ASIDE.c.step)).all()
        found: dict[int, frozenset[str]] = {}
        for position, step in rows:
            found[position] = found.get(position, frozenset()) | {step}
        return found

    def close(self) -> None:
        """Close the journal; waits for a running write."""
        with self._lock, self._lease_lock:
            self._closed = True
            self._database.engine.dispose()
            self._lease_database.engine.dispose()

    def _check_lease(self, connection: sa.Connection) -> None:
        row = connection.exec_driver_sql(self._database.fence, (LEASE,)).one()
        if self._epoch is None or row.epoch != self._epoch:
            raise LeaseLostError(
                f"the journal {self._database.name} is led by {row.holder!r} (epoch {row.epoch}), "
                f"no longer by {self._holder!r} (epoch {self._epoch}): nothing was written",
                holder=row.holder,
                epoch=row.epoch,
            )

    @contextmanager
    def _transaction(self, *, of_lease: bool = False) -> Iterator[sa.Connection]:
        database = self._lease_database if of_lease else self._database
        with self._lease_lock if of_lease else self._lock:
            if self._closed:
                raise StorageError(f"the journal {database.name} is closed")
            try:
                with database.engine.begin() as connection:
                    yield connection
            except (SQLAlchemyError, OSError) as error:
                found = translate(database, error)
                if isinstance(found, JournalUnavailableError):
                    # SQLite keeps a file read-only that it opened while its disk was.
                    database.engine.dispose()
                raise found from error


def _digest(position: int, at: float, body: bytes) -> str:
    head = _HEAD.pack(position, at)
    return hashlib.blake2b(body, digest_size=16, person=head).hexdigest()
