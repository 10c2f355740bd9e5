"""Copies of blobs on this router's machine, within a bound: the least recently used go first.

The blob store has every blob, so a copy may go at any time.
"""

import itertools
import shutil
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Generic, TypeVar

from plexrl.ids import BlobRef
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.router.blobs.store import RECENT_BYTES_MAX

Value = TypeVar("Value")


class LocalCache:
    """Small blobs in memory, large ones as files in one folder. Thread-safe."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Empties the folder. `bytes_max` bounds the files."""
        shutil.rmtree(folder, ignore_errors=True)
        make_private_folder(folder)
        self.folder = folder
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._bodies = _Bounded[bytes](RECENT_BYTES_MAX)
        self._files = _Bounded[Path](bytes_max)

    def new_path(self) -> Path:
        """Path of a new file, for `keep_file`."""
        return self.folder / str(next(self._numbers))

    def keep(self, ref: BlobRef, body: bytes) -> None:
        """Keep a small blob."""
        with self._lock:
            self._bodies.put(ref, body, len(body))

    def keep_file(self, ref: BlobRef, path: Path) -> None:
        """Keep a large blob, whose file the cache then owns. Raises `OSError`."""
        nbytes = path.stat().st_size
        with self._lock:
            gone = self._files.put(ref, path, nbytes)
        for each in gone:
            each.unlink(missing_ok=True)

    def read(self, ref: BlobRef) -> bytes | None:
        """The bytes of a small blob, if they are here."""
        with self._lock:
            return self._bodies.get(ref)

    def file(self, ref: BlobRef) -> Path | None:
        """The file of a large blob, if there is one. It may go at any time, and may be damaged."""
        with self._lock:
            return self._files.get(ref)

    def discard(self, ref: BlobRef) -> None:
        """Delete the copy, if it exists."""
        with self._lock:
            self._bodies.pop(ref)
            path = self._files.pop(ref)
        if path is not None:
            path.unlink(missing_ok=True)


class _Bounded(Generic[Value]):
    """Values by name, whose sizes in bytes have a bound together."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._nbytes = 0
        self._values: OrderedDict[BlobRef, tuple[int, Value]] = OrderedDict()

    def put(self, ref: BlobRef, value: Value, nbytes: int) -> list[Value]:
        """Add a value; returns those that were removed for it, perhaps this one."""
        gone = [old for old in [self.pop(ref)] if old is not None]
        self._values[ref] = nbytes, value
        self._nbytes += nbytes
        while self._nbytes > self._bytes_max:
            _, (size, oldest) = self._values.popitem(last=False)
            self._nbytes -= size
            gone.append(oldest)
        return gone

    def get(self, ref: BlobRef) -> Value | None:
        if ref not in self._values:
            return None
        self._values.move_to_end(ref)
        return self._values[ref][1]

    def pop(self, ref: BlobRef) -> Value | None:
        if ref not in self._values:
            return None
        nbytes, value = self._values.pop(ref)
        self._nbytes -= nbytes
        return value
