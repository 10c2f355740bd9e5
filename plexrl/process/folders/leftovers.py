"""What killed clusters of this user left outside their data directories; the next one removes it.

A cluster has a folder for its sockets and one in shared memory for its host tiers. While it runs it
holds an exclusive lock (`flock`) on the file `owner` in each of them, which names its data
directory. The kernel gives the lock back when the cluster dies. Process ids play no part, because
the kernel uses them again.

A host tier may hold the newest state of models, which the next cluster of the same data directory
goes on with. It is removed only once that data directory is gone.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from plexrl.errors import ConflictError
from plexrl.process.folders.private_folder import is_private_folder, make_private_folder

LOG = logging.getLogger(__name__)

OWNER = "owner"
LOCK = "lock"
"""Of a data directory, held by the cluster that runs on it."""
FOLDERS = "plexrl-*"
TEMPORARY_DATA = "plexrl-data-"
"""Prefix of data directories that go with their cluster."""
TEMPORARY_MARK = "temporary"
"""An empty file in each of them: a data directory that a user has named may begin the same."""
TRIES = 10
TRY_S = 0.01
"""A sweep that looks at a folder has its lock for a moment."""


@contextmanager
def claimed(folder: Path, data_dir: Path) -> Iterator[None]:
    """Make a folder that belongs to the cluster of `data_dir` for as long as the block lasts.

    Raises:
        ConflictError: another cluster has it.
        PermissionDeniedError, StorageError: it cannot be made.
    """
    file = _lock_owner(folder)
    with file:
        file.truncate(0)
        file.write(str(data_dir))
        file.flush()
        yield


def make_temporary_data() -> Path:
    """A new data directory that goes with its cluster."""
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_DATA))
    (folder / TEMPORARY_MARK).touch()
    return folder


def sweep(sockets: tuple[Path, ...], shared_memory: Path) -> None:
    """Remove what dead clusters left in these folders, and temporary data directories of theirs."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_DATA}*"):
        if (path / TEMPORARY_MARK).is_file():
            _remove_if_dead(path, LOCK)
    for parent in dict.fromkeys((*sockets, shared_memory)):
        for path in parent.glob(FOLDERS):
            data_dir = _data_dir_of(path)
            # Without shared memory the host tiers lie beside the sockets.
            if data_dir is not None and (parent != shared_memory or _is_gone(data_dir)):
                _remove_if_dead(path, OWNER)


def empty(folder: Path) -> None:
    """Remove what a folder holds, but for the file that says whose it is."""
    for path in folder.iterdir():
        if path.name == OWNER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _lock_owner(folder: Path) -> IO[str]:
    for attempt in range(TRIES):
        time.sleep(attempt * TRY_S)
        make_private_folder(folder)
        path = folder / OWNER
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A sweep may have removed it since.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except (BlockingIOError, FileNotFoundError):
            pass
        file.close()
    raise ConflictError(
        f"another cluster uses {folder}: two clusters whose data directories have the same path "
        "need temporary folders of their own, as of containers that share none",
        path=str(folder),
    )


def _data_dir_of(folder: Path) -> Path | None:
    if not is_private_folder(folder):
        return None
    try:
        told = Path((folder / OWNER).read_text())
    except (OSError, ValueError):
        return None
    # A folder of other contents may have such a file too.
    return told if told.is_absolute() else None


def _is_gone(path: Path) -> bool:
    """One that cannot be looked at, as on a file system that does not answer, is not gone."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _remove_if_dead(folder: Path, lock: str) -> None:
    """A folder without the lock's file is not known to be a cluster's: it stays."""
    if not is_private_folder(folder):
        return
    try:
        file = (folder / lock).open()
    except OSError:
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder, ignore_errors=True)
        LOG.info("removed %s, which a killed cluster left", folder)
