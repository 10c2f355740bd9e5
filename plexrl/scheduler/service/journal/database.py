"""The databases that can store a journal: SQLite and PostgreSQL.

A path, or `sqlite:///path`, names an SQLite file in WAL mode whose commits return after `fsync`;
`postgresql://user@host/name` names a PostgreSQL database.
"""

import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from plexrl.errors import (
    InvalidRequestError,
    JournalFullError,
    JournalUnavailableError,
    StorageError,
)
from plexrl.process.folders.disk_errors import AWAY
from plexrl.process.folders.durable_files import make_folders_durably
from plexrl.scheduler.service.journal.journal import Row

SQLITE_BUSY_S = 5.0
"""How long a transaction waits for that of another process."""
SQLITE_RETRY_S = 0.01
SQLITE_PAGES_MAX = (1 << 32) - 2
SQLITE_FREE_BYTES_MIN = 256 << 10
"""If SQLite cannot write and the disk has less free space, the disk counts as full."""

SQLITE_UNAVAILABLE = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR),
        *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM),
    }
)
"""Primary result codes of errors that pass, or that an operator can mend."""

POSTGRES_DISK_FULL = "53100"
POSTGRES_UNAVAILABLE = ("08", "25006", "25P03", "53300", "55P03", "57P", "58030")
"""Prefixes of the SQLSTATE codes of temporary errors."""
POSTGRES_UNAVAILABLE_TEXTS = (
    "the database system is",
    "terminating connection",
    "too many clients",
)
"""Messages of a server that refuses connections for now; such errors have no SQLSTATE."""
POSTGRES_MIGRATION_LOCK = 0x706C6578
"""Key of the advisory lock for schema migrations."""

# An unresponsive server must not block a scheduler for longer than a few leases, and a scheduler
# that was suspended inside a transaction must not keep row locks that the next leader needs.
POSTGRES_CONNECT: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "options": (
        "-c lock_timeout=5000 -c idle_in_transaction_session_timeout=5000 -c synchronous_commit=on"
    ),
}


class Database(Protocol):
    """An SQLAlchemy engine, and the statements that differ between databases."""

    name: str
    """Name for messages, without a password."""
    engine: sa.Engine
    fence: str
    """SQL that selects epoch and holder of the lease by name, and locks it."""

    def now(self) -> sa.ColumnElement[float]:
        """The clock of lease expiry, in seconds since the epoch."""
        ...

    def insert(self, connection: sa.Connection, rows: Sequence[Row]) -> None:
        """Insert events by the fastest method of this database."""
        ...

    def lock_schema(self, connection: sa.Connection) -> None:
        """Keep other processes from migrating until the transaction ends."""
        ...

    def lift_size_limit(self, connection: sa.Connection) -> None:
        """Let this transaction exceed `bytes_max`, until `set_size_limit`."""
        ...

    def set_size_limit(self, connection: sa.Connection) -> None:
        """Apply `bytes_max`."""
        ...

    def is_full(self, error: BaseException | None) -> bool:
        """Whether a driver's error means that the storage is full."""
        ...

    def is_unavailable(self, error: BaseException | None) -> bool:
        """Whether a driver's error means that the database is temporarily unavailable."""
        ...


class Sqlite:
    """An SQLite file of at most `bytes_max` bytes; None: limited by the disk."""

    fence = "SELECT epoch, holder FROM lease WHERE name = ?"

    def __init__(self, path: Path, bytes_max: int | None) -> None:
        self.name = str(path)
        self._path = path
        self._bytes_max = bytes_max
        # One connection for all threads: every transaction here writes.
        self.engine = sa.create_engine(
            "sqlite://",
            creator=self._connect,
            poolclass=sa.QueuePool,
            pool_size=1,
            max_overflow=0,
        )
        # Otherwise the driver would begin a transaction only before the first write.
        sa.event.listen(self.engine, "begin", _begin_immediate)

    def now(self) -> sa.ColumnElement[float]:
        """The wall clock of this machine; all processes that open the file run on it."""
        return sa.literal(time.time())

    def insert(self, connection: sa.Connection, rows: Sequence[Row]) -> None:
        """One prepared statement, executed for each row."""
        connection.exec_driver_sql(
            "INSERT INTO events (position, at, body) VALUES (?, ?, ?)", list(rows)
        )

    def lock_schema(self, connection: sa.Connection) -> None:
        """No-op: the transaction locks the file already."""

    def lift_size_limit(self, connection: sa.Connection) -> None:
        """Allow as many pages as SQLite supports."""
        connection.exec_driver_sql(f"PRAGMA max_page_count={SQLITE_PAGES_MAX}")

    def set_size_limit(self, connection: sa.Connection) -> None:
        """Limit the pages. A file beyond the limit keeps its size and stops growing."""
        if self._bytes_max is not None:
            (page_bytes,) = connection.exec_driver_sql("PRAGMA page_size").one()
            pages = max(1, self._bytes_max // page_bytes)
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")

    def is_full(self, error: BaseException | None) -> bool:
        """Whether the size limit or the disk is reached."""
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            return False
        if code == sqlite3.SQLITE_FULL:
            return True
        # SQLite gives no reason if it cannot create the files next to the journal.
        if code & 0xFF not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            return False
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < SQLITE_FREE_BYTES_MIN

    def is_unavailable(self, error: BaseException | None) -> bool:
        """Whether another process locks the file, or its disk or mount fails or is away."""
        code = getattr(error, "sqlite_errorcode", None)
        return code is not None and code & 0xFF in SQLITE_UNAVAILABLE

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=SQLITE_BUSY_S, check_same_thread=False, isolation_level=None
        )
        try:
            _use_wal(connection)
            connection.execute("PRAGMA synchronous=FULL")
            if self._bytes_max is not None:
                (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
                pages = max(1, self._bytes_max // page_bytes)
                connection.execute(f"PRAGMA max_page_count={pages}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    # SQLite refuses this at once while another process switches the same file to WAL; it does not
    # wait as it does for a transaction.
    deadline = time.monotonic() + SQLITE_BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() >= deadline:
                raise
            time.sleep(SQLITE_RETRY_S)


class Postgres:
    """A PostgreSQL database, accessed with psycopg 3."""

    # A scheduler that takes the lease changes this row, so it waits for our transaction.
    fence = "SELECT epoch, holder FROM lease WHERE name = %s FOR UPDATE"

    def __init__(self, url: sa.URL) -> None:
        # The query may hold a password too.
        shown = url.difference_update_query(("password",))
        self.name = shown.render_as_string(hide_password=True)
        self.engine = sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            isolation_level="READ COMMITTED",
            connect_args=POSTGRES_CONNECT,
            pool_size=1,
            max_overflow=0,
        )

    def now(self) -> sa.ColumnElement[float]:
        """The server's clock, so that the schedulers' clocks need not agree."""
        return sa.literal_column("extract(epoch FROM clock_timestamp())::float8", sa.Double())

    def insert(self, connection: sa.Connection, rows: Sequence[Row]) -> None:
        """One statement for all rows, with one array for each column."""
        positions, times, bodies = zip(*rows, strict=True)
        connection.exec_driver_sql(
            "INSERT INTO events (position, at, body)"
            " SELECT * FROM unnest(%s::bigint[], %s::float8[], %s::text[])",
            (list(positions), list(times), list(bodies)),
        )

    def lock_schema(self, connection: sa.Connection) -> None:
        """Take an advisory lock that ends with the transaction."""
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({POSTGRES_MIGRATION_LOCK})")

    def lift_size_limit(self, connection: sa.Connection) -> None:
        """No-op: the server's disk is the limit."""

    def set_size_limit(self, connection: sa.Connection) -> None:
        """No-op."""

    def is_full(self, error: BaseException | None) -> bool:
        """Whether the server's disk is full."""
        return getattr(error, "sqlstate", None) == POSTGRES_DISK_FULL

    def is_unavailable(self, error: BaseException | None) -> bool:
        """Whether the server is stopped, starting, unreachable or read-only, or has dropped the
        connection. An unknown database or user does not count."""
        import psycopg

        if not isinstance(error, psycopg.Error):
            return False
        state = error.sqlstate
        if state is not None:
            return state.startswith(POSTGRES_UNAVAILABLE)
        if not isinstance(error, psycopg.OperationalError):
            return False
        text = str(error)
        return "FATAL:" not in text or any(word in text for word in POSTGRES_UNAVAILABLE_TEXTS)


def open_database(journal: str, bytes_max: int | None) -> Database:
    """The database that `journal` names; does not connect yet.

    Raises:
        InvalidRequestError: not the URL of a supported database.
        StorageError: the file's directory cannot be created.
    """
    if "://" not in journal:
        return _open_file(Path(journal), bytes_max)
    try:
        url = sa.make_url(journal)
    except ArgumentError as error:
        raise InvalidRequestError("the journal's URL cannot be read: check it") from error
    match url.drivername.partition("+")[0]:
        case "sqlite" if url.database:
            return _open_file(Path(url.database), bytes_max)
        case "postgresql" | "postgres":
            try:
                return Postgres(url)
            except ImportError as error:
                raise InvalidRequestError(
                    "a journal in PostgreSQL needs psycopg: pip install 'plexrl[postgres]'"
                ) from error
    raise InvalidRequestError(
        f"a journal cannot be stored in {url.drivername!r}: give a path or "
        "postgresql://user@host/name"
    )


def translate(database: Database, error: Exception) -> StorageError:
    """Convert an error of a driver or of SQLAlchemy to a `StorageError`."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if database.is_full(cause):
        return JournalFullError(
            f"the journal {database.name} is full: free disk space there or raise its limit "
            "(--journal-bytes-max); nothing was changed, and work continues once there is space",
            path=database.name,
        )
    if database.is_unavailable(cause):
        return JournalUnavailableError(
            f"the journal {database.name} does not answer ({_one_line(cause)}): check its disk and "
            "mount, or that its server runs; nothing was changed, it is tried again",
            path=database.name,
        )
    what = str(cause).strip() if not isinstance(error, SQLAlchemyError) or cause else str(error)
    return StorageError(f"the journal {database.name} cannot be used: {what}", path=database.name)


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _open_file(path: Path, bytes_max: int | None) -> Sqlite:
    try:
        make_folders_durably(path.parent)
    except OSError as error:
        kind = JournalUnavailableError if error.errno in AWAY else StorageError
        raise kind(f"the journal {path} cannot be created: {error}") from error
    return Sqlite(path, bytes_max)


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
