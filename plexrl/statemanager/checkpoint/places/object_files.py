"""Ranged reads of a checkpoint's files in an object store, through a local temporary file.

A load checks all ranks' parts before it changes any state, and then reads them again. Bytes are
checked as they arrive; the second read comes from the temporary file, which is mapped, has as many
bytes as this rank needs, and no name.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence

from plexrl.errors import StorageFullError, StorageUnavailableError
from plexrl.process.folders.disk_errors import NO_SPACE
from plexrl.statemanager.checkpoint.places.place import Arrived, Range
from plexrl.storage.object_store import RANGE_BYTES, ObjectStore


class ObjectFiles:
    """Files below one key."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._key = key
        self._spool = tempfile.TemporaryFile(prefix="plexrl-restore-")  # noqa: SIM115  # closed by `close`
        self._spooled: dict[Range, int] = {}
        """Where the bytes of a range are in the temporary file."""
        self._end = 0
        self._mapped = memoryview(b"")

    def size(self, file: str) -> int:
        return self._store.size(f"{self._key}/{file}")

    def read(self, file: str, start: int, buffer: memoryview) -> memoryview:
        at = self._spooled.get((file, start, len(buffer)))
        if at is not None:
            return self._mapped[at : at + len(buffer)]
        buffer[:] = self._store.read_range(f"{self._key}/{file}", start, start + len(buffer))
        return buffer

    def prefetch(self, ranges: Sequence[Range], arrived: Arrived) -> None:
        runs: list[list[Range]] = []
        places: dict[Range, int] = {}
        end = self._end
        for each in sorted(set(ranges) - self._spooled.keys()):
            file, start, nbytes = each
            first = runs[-1][0] if runs else each
            is_next = bool(runs) and (file, start) == (runs[-1][-1][0], sum(runs[-1][-1][1:]))
            if is_next and start + nbytes - first[1] <= RANGE_BYTES:
                runs[-1].append(each)
            else:
                runs.append([each])
            places[each] = end
            end += nbytes

        def fetch(run: Sequence[Range]) -> None:
            file, first, _ = run[0]
            stop = sum(run[-1][1:])
            found = memoryview(self._store.read_range(f"{self._key}/{file}", first, stop))
            for each in run:
                arrived(each, found[each[1] - first :][: each[2]])
            self._write(found, places[run[0]])

        self._store.each(fetch, runs)
        if places:
            self._mapped = memoryview(mmap.mmap(self._spool.fileno(), end, prot=mmap.PROT_READ))
        self._spooled |= places
        self._end = end

    def close(self) -> None:
        # The file's blocks are freed once it is not mapped either.
        self._mapped = memoryview(b"")
        self._spool.close()

    def _write(self, view: memoryview, at: int) -> None:
        try:
            while view.nbytes:
                count = os.pwrite(self._spool.fileno(), view, at)
                view, at = view[count:], at + count
        except OSError as error:
            folder = tempfile.gettempdir()
            kind = StorageFullError if error.errno in NO_SPACE else StorageUnavailableError
            raise kind(
                f"{folder} cannot hold the checkpoint's part of this rank ({error}): free space "
                "there, or set TMPDIR for the node's processes"
            ) from error
