"""Small files of jobs, each written as a whole: samples, captured calls, and what is seen of runs.

A job's files are below `SUBJECT/TENANT/JOB`: a job's id may be used again once the scheduler has
forgotten the job, by another tenant too.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote

from plexrl.process.folders.durable_files import (
    create_durably,
    flush,
    make_folders_durably,
    rename_durably,
)
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.router.blobs.upload import write_error
from plexrl.storage.object_store import ObjectStore, StoredObject


class JobKey(NamedTuple):
    """What the files of a job are kept by."""

    tenant: str
    job: str

    def folder(self, subject: str) -> str:
        """The folder of the job's files about a subject."""
        return "/".join((subject, *map(file_name, self)))


def file_name(id: str) -> str:
    """An id as the name of a file or a folder. One of 200 characters is no longer as a name: of the
    characters of ids, only '/' is quoted."""
    return quote(id, safe=":")


class RecordStore(Protocol):
    """Small files by key, `SUBJECT/TENANT/JOB/…/NAME`. The methods block. They raise
    `StorageError`, `StoreUnavailableError` or `OSError`."""

    def write(self, key: str, content: bytes) -> None:
        """Write a file as a whole, or replace it; it is durable when this returns."""
        ...

    def read(self, key: str) -> bytes | None:
        """A file; None: there is none."""
        ...

    def find(self, folder: str) -> list[StoredObject]:
        """All files below a folder."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly below a folder."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files, if they exist."""
        ...

    def remove(self, folder: str, *, before: float) -> bool:
        """Delete a folder with all that it has, if it exists and none of its files was written at
        that time or later; whether it was so."""
        ...

    def clock(self) -> float:
        """The time of a file that is written now, as `StoredObject.modified_s`."""
        ...


class RecordFiles:
    """Small files in one directory, which all routers share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, key: str, content: bytes) -> None:
        path = self._directory / key
        try:
            make_private_folder(self._directory / key.partition("/")[0])
            try:
                self._write(path, content)
            except FileNotFoundError:
                # Another router has removed the folder, which was empty or old, meanwhile.
                self._write(path, content)
        except OSError as error:
            raise write_error(self._directory, error) from error

    def _write(self, path: Path, content: bytes) -> None:
        make_folders_durably(path.parent, mode=0o700)
        # Another writer may have made a folder, and not have flushed its name yet.
        for parent in path.parent.relative_to(self._directory).parents:
            flush(self._directory / parent)
        part = path.with_name(f"{uuid.uuid4().hex}.part")
        try:
            create_durably(part, content)
            rename_durably(part, path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def read(self, key: str) -> bytes | None:
        try:
            with self._typed():
                return (self._directory / key).read_bytes()
        except FileNotFoundError:
            return None

    def find(self, folder: str) -> list[StoredObject]:
        with self._typed():
            return self._find(folder)

    def _find(self, folder: str) -> list[StoredObject]:
        found = []
        for parent, _, names in os.walk(self._directory / folder, onerror=_refuse_unless_gone):
            for name in names:
                path = Path(parent, name)
                # What a killed router was writing is no file yet.
                if path.suffix != ".part":
                    with suppress(FileNotFoundError):
                        about = path.stat()
                        key = str(path.relative_to(self._directory))
                        found.append(StoredObject(key, about.st_size, about.st_mtime))
        return found

    def folders(self, folder: str) -> list[str]:
        try:
            return [path.name for path in (self._directory / folder).iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []

    def delete(self, keys: Iterable[str]) -> None:
        with self._typed():
            for key in keys:
                (self._directory / key).unlink(missing_ok=True)

    def remove(self, folder: str, *, before: float) -> bool:
        if not _is_older(self.find(folder), before):
            return False
        path = self._directory / folder
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
        for parent in path.relative_to(self._directory).parents[:-2]:
            try:
                (self._directory / parent).rmdir()
            except OSError:
                # It has folders of other jobs.
                break
        return True

    def clock(self) -> float:
        # By the clock of the file system, which on a mount is another machine's.
        os.utime(self._directory)
        return self._directory.stat().st_mtime

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Errors of the disk in their types: requests of users fail with them."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise write_error(self._directory, error) from error


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

    def find(self, folder: str) -> list[StoredObject]:
        return self._store.find(folder)

    def folders(self, folder: str) -> list[str]:
        return self._store.folders(folder)

    def delete(self, keys: Iterable[str]) -> None:
        self._store.delete(keys)

    def remove(self, folder: str, *, before: float) -> bool:
        found = self._store.find(folder)
        if not _is_older(found, before):
            return False
        # One that is written meanwhile stays.
        self._store.delete(each.key for each in found)
        return True

    def clock(self) -> float:
        return time.time()


def _is_older(files: Iterable[StoredObject], before: float) -> bool:
    return all(each.modified_s < before for each in files)


def _refuse_unless_gone(error: OSError) -> None:
    # A folder that was listed may have been removed meanwhile.
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
