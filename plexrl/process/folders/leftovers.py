"""Removes leftovers of this user's killed clusters outside of their data directories.

A cluster has a folder for its sockets, and one in shared memory for its host tiers. While it runs,
it holds an exclusive lock (`flock`) on the file `owner` in each of them, which names its data
directory. The kernel releases the lock when the cluster dies. Process ids are not used, because the
kernel reuses them.

A host tier may hold the newest state of models, which the next cluster of the same data directory
continues with. It is removed only if that data directory does not exist any more.
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
"""Lock file of a data directory, held by the cluster that runs on it."""
FOLDERS = "plexrl-*"
TEMPORARY_DATA = "plexrl-data-"
"""Prefix of data directories that are removed with their cluster."""
TEMPORARY_MARK = "temporary"
"""An empty file in each temporary data directory. A user's own data directory may have the same
prefix, but lacks this file."""
TRIES = 10
TRY_S = 0.01
"""Backoff of retries to lock a folder: a sweep holds the lock for a moment."""


@contextmanager
def claimed(folder: Path, data_dir: Path) -> Iterator[None]:
    """Create a folder, and reserve it for the cluster of `data_dir` while the block runs.

    Raises:
        ConflictError: another cluster uses it.
        PermissionDeniedError, StorageError: it cannot be created.
    """
    file = _lock_owner(folder)
    with file:
        file.truncate(0)
        file.write(str(data_dir))
        file.flush()
        yield


def make_temporary_data() -> Path:
    """A new data directory that is removed with its cluster."""
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_DATA))
    (folder / TEMPORARY_MARK).touch()
    return folder


def sweep(sockets: tuple[Path, ...], shared_memory: Path) -> None:
    """Remove leftovers of dead clusters in these folders, and their temporary data directories."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_DATA}*"):
        if (path / TEMPORARY_MARK).is_file():
            _remove_if_dead(path, LOCK)
    for parent in dict.fromkeys((*sockets, shared_memory)):
        for path in parent.glob(FOLDERS):
            data_dir = _data_dir_of(path)
            # Without shared memory the host tiers are in the same folder as the sockets.
            if data_dir is not None and (parent != shared_memory or _is_gone(data_dir)):
                _remove_if_dead(path, OWNER)


def empty(folder: Path) -> None:
    """Remove a folder's contents, except the file `owner`."""
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
            # A sweep may have removed the file since it was opened.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except (BlockingIOError, FileNotFoundError):
            pass
        file.close()
    raise ConflictError(
        f"another cluster uses {folder}: stop it or use another data directory. Two containers "
        "whose data directories have the same path must not share their temporary folders",
        path=str(folder),
    )


def _data_dir_of(folder: Path) -> Path | None:
    if not is_private_folder(folder):
        return None
    try:
        owner = Path((folder / OWNER).read_text())
    except (OSError, ValueError):
        return None
    # Another program's folder may have a file with this name.
    return owner if owner.is_absolute() else None


def _is_gone(path: Path) -> bool:
    """Whether a path does not exist. False if it cannot be checked, as on a stalled file system."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _remove_if_dead(folder: Path, lock: str) -> None:
    """Remove a folder if no cluster holds its lock. A folder without the lock file is kept."""
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
        LOG.info("removed %s, a leftover of a killed cluster", folder)
