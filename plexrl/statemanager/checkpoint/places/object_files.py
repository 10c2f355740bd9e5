"""Ranged reads of a checkpoint's files in an object store, through a local temporary file.

A load checks all ranks' parts before it changes any state, and then reads them again. The second
read comes from the temporary file, which has as many bytes as this rank needs, and no name.
"""

import os
import tempfile
from collections.abc import Sequence

from plexrl.errors import NO_SPACE, StorageError, StorageFullError
from plexrl.statemanager.checkpoint.places.place import Range
from plexrl.storage.object_store import ObjectStore


class ObjectFiles:
    """Files below one key."""

    keeps_prefetched = True

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._key = key
        self._spool = tempfile.TemporaryFile(prefix="plexrl-restore-")  # noqa: SIM115  # closed by `close`
        self._spooled: dict[Range, int] = {}
        """Where the bytes of a range are in the temporary file."""
        self._end = 0

    def size(self, file: str) -> int:
        return self._store.size(f"{self._key}/{file}")

    def read_into(self, file: str, target: memoryview, start: int) -> int:
        at = self._spooled.get((file, start, len(target)))
        if at is None:
            target[:] = self._store.read_range(f"{self._key}/{file}", start, start + len(target))
            return len(target)
        filled = 0
        while filled < len(target):
            filled += os.preadv(self._spool.fileno(), [target[filled:]], at + filled)
        return filled

    def prefetch(self, ranges: Sequence[Range]) -> None:
        missing = sorted({each for each in ranges if each not in self._spooled})
        runs: list[tuple[str, int, int]] = []
        places: dict[str, list[tuple[int, int, int]]] = {}
        end = self._end
        new: dict[Range, int] = {}
        for file, start, nbytes in missing:
            key = f"{self._key}/{file}"
            if runs and runs[-1][0] == key and runs[-1][2] == start:
                runs[-1] = (key, runs[-1][1], start + nbytes)
                places[key][-1] = (places[key][-1][0], start + nbytes, places[key][-1][2])
            else:
                runs.append((key, start, start + nbytes))
                places.setdefault(key, []).append((start, start + nbytes, end))
            new[(file, start, nbytes)] = end
            end += nbytes

        def take(key: str, start: int, data: bytes) -> None:
            first, _, at = next(run for run in places[key] if run[0] <= start < run[1])
            self._write(data, at + start - first)

        self._store.read_ranges(runs, take)
        self._spooled |= new
        self._end = end

    def close(self) -> None:
        self._spool.close()

    def _write(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        try:
            while view.nbytes:
                count = os.pwrite(self._spool.fileno(), view, at)
                view, at = view[count:], at + count
        except OSError as error:
            folder = tempfile.gettempdir()
            kind = StorageFullError if error.errno in NO_SPACE else StorageError
            raise kind(
                f"{folder} cannot hold the checkpoint's part of this rank ({error}): free space "
                "there, or set TMPDIR for the node's processes"
            ) from error
