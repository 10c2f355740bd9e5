"""Small files of jobs, each written as a whole: samples, and what is seen of runs."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from plexrl.process.folders.durable_files import write_durably
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.router.blobs.upload import write_error
from plexrl.storage.object_store import ObjectStore


class RecordStore(Protocol):
    """Small files by key, `FOLDER/JOB/NAME`. The methods block. They raise `StorageError`, or
    `StoreUnavailableError`."""

    def write(self, key: str, content: bytes) -> None:
        """Write a file as a whole, or replace it."""
        ...

    def read(self, key: str) -> bytes | None:
        """A file; None: there is none."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the files in `FOLDER/JOB`, by name."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files, if they exist."""
        ...


class RecordFiles:
    """Small files in one directory, which all routers share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writing = threading.Lock()
        """Two writers of one file would share its temporary file."""

    def write(self, key: str, content: bytes) -> None:
        path = self._directory / key
        try:
            with self._writing:
                for folder in (self._directory, path.parents[1], path.parent):
                    make_private_folder(folder)
                write_durably(path, content)
        except OSError as error:
            raise write_error(self._directory, error) from error

    def read(self, key: str) -> bytes | None:
        try:
            return (self._directory / key).read_bytes()
        except FileNotFoundError:
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        if not (self._directory / folder).is_dir():
            return found
        for path in (self._directory / folder).iterdir():
            # What a killed router was writing is no file yet.
            if path.suffix != ".part":
                try:
                    found[path.name] = path.stat().st_size
                except FileNotFoundError:
                    continue
        return found

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self._directory / key).unlink(missing_ok=True)


class RecordObjects:
    """Small files in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def write(self, key: str, content: bytes) -> None:
        self._store.write(key, content)

    def read(self, key: str) -> bytes | None:
        try:
            return self._store.read(key)
        except FileNotFoundError:
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        return {each.key.rpartition("/")[2]: each.nbytes for each in self._store.find(folder)}

    def delete(self, keys: Iterable[str]) -> None:
        self._store.delete(keys)
