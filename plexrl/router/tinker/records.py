"""What routers remember of Tinker clients, in a file that outlives them.

Sessions, models, samplers, saved weights and futures are records; operations and their results are
the scheduler's. A record is written before the answer that depends on it is sent. The file is
synced to the disk at its checkpoints only: a killed router loses nothing, a machine that loses
power may lose the last records, and the file stays whole.

All routers of a machine share the file, so that any of them can answer any request. What must be
done by one at a time is done under a lock of the file (`exclusive`), which the system takes away
from a process that dies.
"""

import asyncio
import fcntl
import hashlib
import os
import sqlite3
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec


class ClientRecord(msgspec.Struct, kw_only=True):
    """Base of the records. `id` is unique among those of its class."""

    id: str
    session: str
    made_at: float = msgspec.field(default_factory=time.time)
    """Seconds since the epoch."""


class SessionRecord(ClientRecord, kw_only=True):
    """A client of the SDK. Its id is that of its job."""

    tenant: str
    name: str = ""
    metadata: dict[str, Any] = {}
    is_finished: bool = False
    finished_at: float = 0.0
    """Seconds since the epoch; 0: it has not finished, or did so under an earlier version."""


class HeardRecord(ClientRecord, kw_only=True):
    """A sign of life of a session. Its id is the session's, and `made_at` the sign's time."""


class ModelRecord(ClientRecord, kw_only=True):
    """A model that is trained: a train deployment of its session's job."""

    deployment: str
    base_model: str
    """The name that the client used."""
    folder: str
    """The base model's directory."""
    lora: dict[str, Any] | None
    """`LoraSpec`'s fields; None: all parameters are trained."""
    trains_attention: bool = True
    trains_mlp: bool = True
    next_seq: int = 1
    metadata: dict[str, Any] = {}


class WeightsRecord(ClientRecord, kw_only=True):
    """Saved weights. Its id is their path, `tinker://MODEL/weights/NAME`."""

    model: str
    checkpoint: str
    """Name of the checkpoint in the session's job."""
    expires_at: float | None = None
    metadata: dict[str, str] = {}


class SamplerRecord(ClientRecord, kw_only=True):
    """A client that samples."""

    deployment: str
    base_model: str
    path: str | None = None
    """Path of saved weights that are kept."""
    checkpoint: tuple[str, str] | None = None
    """Job and name of the checkpoint; None: the base model's weights."""


class RolloutRecord(ClientRecord, kw_only=True):
    """A rollout deployment of samplers. Its id is the deployment's."""

    loaded: tuple[str, str] | None = None
    """Checkpoint that was loaded last."""
    load: str = ""
    """Operation that loads it; empty: nothing was loaded."""
    loads: int = 0
    """Loads so far. The name of a load has their number, because an operation runs once."""


class FutureRecord(ClientRecord, kw_only=True):
    """A request whose result the client polls for."""

    kind: str
    operation: str = ""
    """Empty: there is none, and `result` has the answer."""
    result: dict[str, Any] = {}
    """The answer, or what it takes to make it of the operation's result."""
    error: dict[str, Any] | None = None
    """Why the request was refused."""
    after: str = ""
    """Operation that must have succeeded before: the load of the weights. Empty: none."""


class WaitingRecord(ClientRecord, kw_only=True):
    """A training request that waits for an earlier one of its model, or for the scheduler. Its id
    is its future's, and its batch is in a file."""

    model: str
    tenant: str
    kind: str
    """Kind of PlexRL's operation."""
    nbytes: int
    """Size of the batch."""


RecordT = TypeVar("RecordT", bound=ClientRecord)


LOCK_PAUSES_S = (0.002, 0.05)
"""Shortest and longest pause between two attempts to take a lock."""
OPENING = 0
"""The byte of the lock file that is held while the file is made."""


class RecordFile:
    """All records, in one SQLite file."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        self.folder.mkdir(parents=True, exist_ok=True)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lock_file = os.open(path.with_suffix(".locks"), os.O_RDWR | os.O_CREAT, 0o600)
        # Of several that open a new file, one makes it.
        fcntl.fcntl(self._lock_file, fcntl.F_OFD_SETLKW, _range(fcntl.F_WRLCK, OPENING))
        self._file = sqlite3.connect(path, isolation_level=None)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")
        self._file.execute(
            "CREATE TABLE IF NOT EXISTS records (kind TEXT, id TEXT, session TEXT, body BLOB, "
            "PRIMARY KEY (kind, id)) WITHOUT ROWID"
        )
        self._file.execute("CREATE INDEX IF NOT EXISTS by_session ON records (session, kind)")
        fcntl.fcntl(self._lock_file, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, OPENING))

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncIterator[None]:
        """Hold the lock `name`, which one router and one task of it has at a time."""
        at, pause_s = _place(name), LOCK_PAUSES_S[0]
        async with self._locks.setdefault(name, asyncio.Lock()):
            while not self._take(at):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LOCK_PAUSES_S[1])
            try:
                yield
            finally:
                fcntl.fcntl(self._lock_file, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, at))

    def _take(self, at: int) -> bool:
        try:
            fcntl.fcntl(self._lock_file, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, at))
        except BlockingIOError:
            return False
        return True

    def put(self, record: ClientRecord) -> None:
        """Add or replace a record."""
        self._file.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", _row(record))

    def add(self, record: ClientRecord) -> None:
        """Add a record, unless there is one of its id."""
        self._file.execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)", _row(record))

    def update(self, record: ClientRecord) -> None:
        """Replace a record, unless it was removed."""
        kind, id, _, body = _row(record)
        query = "UPDATE records SET body = ? WHERE kind = ? AND id = ?"
        self._file.execute(query, (body, kind, id))

    def find(self, kind: type[RecordT], id: str) -> RecordT | None:
        """A record; None: there is none."""
        query = "SELECT body FROM records WHERE kind = ? AND id = ?"
        row = self._file.execute(query, (kind.__name__, id)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=kind)

    def all(self, kind: type[RecordT], session: str | None = None) -> list[RecordT]:
        """All records of a class, or those of a session, oldest first."""
        query, arguments = "SELECT body FROM records WHERE kind = ?", [kind.__name__]
        if session is not None:
            query, arguments = f"{query} AND session = ?", [*arguments, session]
        rows = self._file.execute(query, arguments)
        found = [msgspec.json.decode(row[0], type=kind) for row in rows]
        return sorted(found, key=lambda each: each.made_at)

    def sessions_of(self, kinds: Sequence[type[ClientRecord]]) -> set[str]:
        """Ids of the sessions that have records of any of the classes."""
        marks = ", ".join("?" * len(kinds))
        query = f"SELECT DISTINCT session FROM records WHERE kind IN ({marks})"
        return {row[0] for row in self._file.execute(query, [each.__name__ for each in kinds])}

    def drop(self, record: ClientRecord) -> None:
        """Remove a record."""
        query = "DELETE FROM records WHERE kind = ? AND id = ?"
        self._file.execute(query, (type(record).__name__, record.id))

    def drop_all(self, kind: type[ClientRecord], session: str) -> None:
        """Remove a session's records of a class."""
        query = "DELETE FROM records WHERE kind = ? AND session = ?"
        self._file.execute(query, (kind.__name__, session))

    def close(self) -> None:
        """Close the file, and give up its locks."""
        self._file.close()
        os.close(self._lock_file)


def request_digest(text: str) -> str:
    """A short name that follows from a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _row(record: ClientRecord) -> tuple[str, str, str, bytes]:
    return (type(record).__name__, record.id, record.session, msgspec.json.encode(record))


def _place(name: str) -> int:
    """The byte of the lock file that is a name's lock."""
    return 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


def _range(kind: int, at: int) -> bytes:
    """Linux's `struct flock` for one byte. Its locks belong to the open file: those of two routers
    in one process exclude each other, too."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0)
