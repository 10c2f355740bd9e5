"""The databases a journal can lie in, and what differs between them.

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

SQLITE_BUSY_S = 5.0
"""How long a transaction waits for another process's."""
SQLITE_RETRY_S = 0.01
SQLITE_PAGES_MAX = (1 << 32) - 2
SQLITE_ROOM_BYTES = 256 << 10
"""With less free, a disk counts as full where SQLite cannot write."""

POSTGRES_DISK_FULL = "53100"
POSTGRES_AWAY = ("08", "25P03", "53300", "55P03", "57P")
"""Beginnings of the states that say: not now."""
POSTGRES_AWAY_WORDS = ("the database system is", "terminating connection", "too many clients")
"""In the words of a server that lets nobody in now; a refused connection has no state."""
POSTGRES_MIGRATION_LOCK = 0x706C6578
"""Key of the advisory lock under which the schema is made or changed."""

# A server that fell silent must not hold a scheduler for longer than a few leases, and a scheduler
# that was suspended inside a transaction must not keep its row locks from the next leader.
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

Row = tuple[int, float, str]
"""(position, time, body) of an event."""


class Database(Protocol):
    """An engine and the words in which its database differs."""

    name: str
    """For messages; without a password."""
    engine: sa.Engine
    fence: str
    """Text that selects the lease's epoch and holder by its name, and keeps others from it."""

    def now(self) -> sa.ColumnElement[float]:
        """The time by which leases expire, in seconds since the epoch."""
        ...

    def insert(self, connection: sa.Connection, rows: Sequence[Row]) -> None:
        """Add events, as quickly as this database can."""
        ...

    def lock_schema(self, connection: sa.Connection) -> None:
        """Have no other process migrate before this transaction's end."""
        ...

    def lift_bound(self, connection: sa.Connection) -> None:
        """Let this transaction use room beyond `bytes_max`; `set_bound` ends that."""
        ...

    def set_bound(self, connection: sa.Connection) -> None:
        """Keep to `bytes_max`."""
        ...

    def is_full(self, error: BaseException | None) -> bool:
        """Whether a driver's error says that there is no room."""
        ...

    def is_away(self, error: BaseException | None) -> bool:
        """Whether a driver's error says that the database does not answer now."""
        ...


class Sqlite:
    """One file. `bytes_max` bounds it; absent, the disk does."""

    fence = "SELECT epoch, holder FROM lease WHERE name = ?"

    def __init__(self, path: Path, bytes_max: int | None) -> None:
        self.name = str(path)
        self._path = path
        self._bytes_max = bytes_max
        # One connection, handed from thread to thread: every transaction here is a writer's.
        self.engine = sa.create_engine(
            "sqlite://",
            creator=self._connect,
            poolclass=sa.QueuePool,
            pool_size=1,
            max_overflow=0,
        )
        # Without this the driver would begin by itself, and only before a write.
        sa.event.listen(self.engine, "begin", _begin_immediate)

    def now(self) -> sa.ColumnElement[float]:
        """This machine's wall time: all who open the file are on it."""
        return sa.literal(time.time())

    def insert(self, connection: sa.Connection, rows: Sequence[Row]) -> None:
        """One prepared statement, run once a row."""
        connection.exec_driver_sql(
            "INSERT INTO events (position, at, body) VALUES (?, ?, ?)", list(rows)
        )

    def lock_schema(self, connection: sa.Connection) -> None:
        """Nothing: the transaction holds the file already."""

    def lift_bound(self, connection: sa.Connection) -> None:
        """A file may have as many pages as SQLite can count."""
        connection.exec_driver_sql(f"PRAGMA max_page_count={SQLITE_PAGES_MAX}")

    def set_bound(self, connection: sa.Connection) -> None:
        """A file that has grown beyond its bound stays so large, and grows no more."""
        if self._bytes_max is not None:
            (page_bytes,) = connection.exec_driver_sql("PRAGMA page_size").one()
            pages = max(1, self._bytes_max // page_bytes)
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")

    def is_full(self, error: BaseException | None) -> bool:
        """Whether the file's bound or the disk's is met."""
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            return False
        if code == sqlite3.SQLITE_FULL:
            return True
        # Where it cannot make the files beside the journal, SQLite does not say why.
        if code & 0xFF not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            return False
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < SQLITE_ROOM_BYTES

    def is_away(self, error: BaseException | None) -> bool:
        """Whether another process has kept the file locked."""
        code = getattr(error, "sqlite_errorcode", None)
        return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

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
    # While another process makes the same new file a WAL one, this is refused at once: SQLite does
    # not wait there as it does for a transaction.
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
    """One database of a PostgreSQL server, reached by psycopg 3."""

    # Whoever takes the lease must change this row, and waits for the end of our transaction.
    fence = "SELECT epoch, holder FROM lease WHERE name = %s FOR UPDATE"

    def __init__(self, url: sa.URL) -> None:
        # A password may stand in the query too.
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
        """The server's clock: the schedulers' machines need not agree about the time."""
        return sa.literal_column("extract(epoch FROM clock_timestamp())::float8", sa.Double())

    def insert(self, connection: sa.Connection, rows: Sequence[Row]) -> None:
        """One statement whatever the number of rows: each column travels as one array."""
        positions, times, bodies = zip(*rows, strict=True)
        connection.exec_driver_sql(
            "INSERT INTO events (position, at, body)"
            " SELECT * FROM unnest(%s::bigint[], %s::float8[], %s::text[])",
            (list(positions), list(times), list(bodies)),
        )

    def lock_schema(self, connection: sa.Connection) -> None:
        """An advisory lock, given back with the transaction."""
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({POSTGRES_MIGRATION_LOCK})")

    def lift_bound(self, connection: sa.Connection) -> None:
        """Nothing: the server's disk is the bound."""

    def set_bound(self, connection: sa.Connection) -> None:
        """Nothing, likewise."""

    def is_full(self, error: BaseException | None) -> bool:
        """Whether the server's disk is full."""
        return getattr(error, "sqlstate", None) == POSTGRES_DISK_FULL

    def is_away(self, error: BaseException | None) -> bool:
        """Whether the server is stopped, starting or out of reach, or has dropped the connection.
        A server that knows no such database or user is not away."""
        import psycopg

        if not isinstance(error, psycopg.OperationalError):
            return False
        state = error.sqlstate
        if state is not None:
            return state.startswith(POSTGRES_AWAY)
        text = str(error)
        return "FATAL:" not in text or any(word in text for word in POSTGRES_AWAY_WORDS)


def open_database(journal: str, bytes_max: int | None) -> Database:
    """The database that `journal` names; connects to nothing yet.

    Raises:
        InvalidRequestError: no URL of a database that is known here.
        StorageError: the file's directory cannot be made.
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
        f"a journal cannot lie in {url.drivername!r}: give a path or postgresql://user@host/name"
    )


def translate(database: Database, error: Exception) -> StorageError:
    """`error` of a driver or of SQLAlchemy as one of ours."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if database.is_full(cause):
        return JournalFullError(
            f"the journal {database.name} has no room: free disk space there or raise its bound "
            "(--journal-bytes-max); nothing was changed, and work goes on when there is room",
            path=database.name,
        )
    if database.is_away(cause):
        return JournalUnavailableError(
            f"the journal's database {database.name} does not answer ({_one_line(cause)}): see "
            "that it runs and can be reached; nothing was changed, it is tried again",
            path=database.name,
        )
    what = str(cause).strip() if not isinstance(error, SQLAlchemyError) or cause else str(error)
    return StorageError(f"the journal {database.name} cannot be used: {what}", path=database.name)


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _open_file(path: Path, bytes_max: int | None) -> Sqlite:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the journal {path} cannot be made: {error}") from error
    return Sqlite(path, bytes_max)


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
