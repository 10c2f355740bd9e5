"""Errors of a disk that an operator can mend are retriable everywhere, as those of a full disk."""

import asyncio
import errno
import os
import sqlite3
from pathlib import Path

import pytest

from plexrl.errors import (
    JournalFullError,
    JournalUnavailableError,
    StateTierFullError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    is_storage_held,
)
from plexrl.ids import BlobRef
from plexrl.process.folders.disk_errors import AWAY, FAILING
from plexrl.router.blobs import upload
from plexrl.router.blobs.directory import DirectoryBlobStore
from plexrl.router.job_files.metrics_log import MetricsFiles
from plexrl.router.job_files.record_store import JobKey
from plexrl.router.services.error_responses import error_response
from plexrl.scheduler.operations.held.holding import is_held
from plexrl.scheduler.service.journal.database import Postgres, open_database, translate
from plexrl.statemanager.store import disk_space
from tests.small_disk import small_disk

FULL = (errno.ENOSPC, errno.EDQUOT)


@pytest.mark.parametrize("number", [*FULL, *sorted(AWAY)], ids=errno.errorcode.get)
def test_every_such_error_is_retried_by_clients_and_held_by_the_scheduler(number: int) -> None:
    error = OSError(number, os.strerror(number))
    kind = StorageFullError if number in FULL else StorageUnavailableError
    for found in (
        upload.write_error(Path("/blobs"), error),
        disk_space.write_error("the tier", error),
        disk_space.checkpoint_write_error("the file", error, "f"),
    ):
        assert isinstance(found, kind)
        assert "retry-after" in error_response(found).headers
        assert is_held(found, state_intact=True)
        assert is_storage_held(found.code)
    held = disk_space.held_error(error, "it")
    assert (held is not None) == (number in FULL or number in FAILING)


def test_other_errors_are_none_of_these() -> None:
    error = OSError(errno.EBADF, "a bug")
    for found in (upload.write_error(Path("/b"), error), disk_space.write_error("t", error)):
        assert type(found) is StorageError
        assert "retry-after" not in error_response(found).headers
        assert not is_held(found, state_intact=True)
    assert disk_space.held_error(error, "it") is None
    assert disk_space.held_error(ValueError(), "it") is None
    assert isinstance(disk_space.write_error("t", OSError(errno.ENOMEM, "m")), StateTierFullError)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_FULL, JournalFullError),
        (sqlite3.SQLITE_BUSY, JournalUnavailableError),
        (sqlite3.SQLITE_IOERR, JournalUnavailableError),
        (sqlite3.SQLITE_IOERR_FSYNC, JournalUnavailableError),
        (sqlite3.SQLITE_READONLY, JournalUnavailableError),
        (sqlite3.SQLITE_READONLY_DBMOVED, JournalUnavailableError),
        (sqlite3.SQLITE_CANTOPEN, JournalUnavailableError),
        (sqlite3.SQLITE_PERM, JournalUnavailableError),
        (sqlite3.SQLITE_CORRUPT, StorageError),
        (sqlite3.SQLITE_NOTADB, StorageError),
    ],
)
def test_errors_of_sqlite_are_sorted(tmp_path: Path, code: int, kind: type[StorageError]) -> None:
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorcode = code
    database = open_database(str(tmp_path / "journal.sqlite"), None)
    assert type(translate(database, error)) is kind


@pytest.mark.parametrize("state", ["25006", "58030", "57P03"])
def test_a_read_only_or_failing_server_is_away(state: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    database = open_database("postgresql://plexrl@nowhere/journal", None)
    assert isinstance(database, Postgres)
    error = psycopg.errors.lookup(state)("it failed")
    assert type(translate(database, error)) is JournalUnavailableError


def test_a_read_only_disk_refuses_payloads_and_metrics_until_it_is_writable(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        blobs = DirectoryBlobStore(disk.path / "blobs")
        metrics = MetricsFiles(disk.path, row_bytes_max=1000, job_bytes_max=10_000)
        ref = BlobRef("o")
        asyncio.run(blobs.write(ref, b"former"))
        disk.make_read_only()
        with pytest.raises(StorageUnavailableError):
            asyncio.run(blobs.write(ref, b"new"))
        with pytest.raises(StorageUnavailableError):
            metrics.append(JobKey("t", "j"), 0, {"loss": 1.0})
        disk.make_writable()
        asyncio.run(blobs.write(ref, b"new"))
        metrics.append(JobKey("t", "j"), 0, {"loss": 1.0})
        assert bytes(asyncio.run(blobs.read(ref))) == b"new"
