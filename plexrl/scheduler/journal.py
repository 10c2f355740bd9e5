"""The journal: every event the scheduler accepted, in order, on disk before it counts.

Events are appended in groups, one transaction each, so that many that arrive together share one
`fsync`. A journal read from the start into a new core rebuilds its state (design §5, Durability).
"""

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from plexrl.errors import JournalFullError, StorageError
from plexrl.scheduler.events import CODEC, Event

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS events (
    position INTEGER PRIMARY KEY, at REAL NOT NULL, body TEXT NOT NULL
) STRICT;
"""

Entry = tuple[Event, float]
"""An event and the time it was accepted at, in seconds."""


class Journal(Protocol):
    """Where accepted events are kept."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Make all entries durable, or none.

        Raises:
            JournalFullError: there is no room.
            StorageError: the journal cannot be written for another reason.
        """
        ...

    def read(self) -> Iterator[Entry]:
        """Every entry, oldest first."""
        ...

    def close(self) -> None:
        """Give the journal back."""
        ...


class SqliteJournal:
    """One SQLite file in WAL mode; a commit returns after `fsync`.

    `bytes_max` bounds the file; absent, the disk does. Used from one thread at a time.
    """

    def __init__(self, path: Path, bytes_max: int | None = None) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self._translate(error) from error
        try:
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            if bytes_max is not None:
                (page_size,) = self._connection.execute("PRAGMA page_size").fetchone()
                self._connection.execute(f"PRAGMA max_page_count={max(1, bytes_max // page_size)}")
            self._connection.executescript(_SCHEMA)
            self._check_schema()
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def append(self, entries: Sequence[Entry]) -> None:
        """Make all entries durable, or none. Raises as `Journal.append`."""
        rows = [(at, CODEC.encode(event).decode()) for event, at in entries]
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT INTO events (at, body) VALUES (?, ?)", rows)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise self._translate(error) from error

    def read(self) -> Iterator[Entry]:
        """Every entry, oldest first."""
        cursor = self._connection.execute("SELECT at, body FROM events ORDER BY position")
        for at, body in cursor:
            yield CODEC.decode(body), at

    def close(self) -> None:
        """Give the journal back."""
        self._connection.close()

    def _check_schema(self) -> None:
        row = self._connection.execute("SELECT value FROM meta WHERE name='schema'").fetchone()
        if row is None:
            self._connection.execute(
                "INSERT INTO meta (name, value) VALUES ('schema', ?)", (str(SCHEMA_VERSION),)
            )
        elif int(row[0]) != SCHEMA_VERSION:
            raise StorageError(
                f"{self._path} has journal schema {row[0]}; this version reads {SCHEMA_VERSION}: "
                "use the version of PlexRL that wrote it, or another data directory"
            )

    def _translate(self, error: Exception) -> StorageError:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        if full:
            return JournalFullError(
                f"the journal {self._path} has no room: free disk space there or raise the "
                "journal's bound; nothing was changed, try again then",
                path=str(self._path),
            )
        return StorageError(
            f"the journal {self._path} cannot be written: {error}", path=str(self._path)
        )
