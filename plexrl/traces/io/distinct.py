"""Detects repeated keys exactly, in bounded memory."""

import sqlite3
import tempfile
from pathlib import Path

IN_MEMORY = 16_384
"""Most keys in memory; further keys go to a file."""


class DistinctKeys:
    """A set of keys; as a context manager it deletes its file at the end."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._keys: set[str] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._database: sqlite3.Connection | None = None

    def add(self, key: str) -> bool:
        """Add `key`; returns whether it was new."""
        if key in self._keys:
            return False
        if len(self._keys) < self._in_memory:
            self._keys.add(key)
            return True
        if self._database is None:
            self._database = self._open()
        found = self._database.execute("INSERT OR IGNORE INTO keys VALUES (?)", (key,))
        return found.rowcount == 1

    def close(self) -> None:
        """Delete the file."""
        if self._database is not None:
            self._database.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> "DistinctKeys":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        self._folder = tempfile.TemporaryDirectory(prefix="plexrl-keys-")
        database = sqlite3.connect(Path(self._folder.name) / "keys.sqlite", isolation_level=None)
        # The file need not survive this process.
        database.execute("PRAGMA journal_mode=OFF")
        database.execute("PRAGMA synchronous=OFF")
        database.execute("CREATE TABLE keys (key TEXT PRIMARY KEY) WITHOUT ROWID")
        database.execute("BEGIN")
        return database
