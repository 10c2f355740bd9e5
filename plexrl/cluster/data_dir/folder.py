"""The data directory of a cluster, and the lock that allows one cluster at a time on it.

A running cluster holds an exclusive lock (`flock`) on the file `lock` in its data directory. The
kernel releases the lock when the process ends, however it ends, so a leftover file means nothing.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from plexrl.errors import StorageError
from plexrl.process.folders.leftovers import LOCK
from plexrl.process.folders.private_folder import make_private_folder

DATA_DIR = Path("~/.plexrl")
"""Default data directory of `plexrl up`, of the other commands and of `plexrl.connect`."""
OTHERWISE = "name another data directory (`data_dir=`, `--data-dir` or PLEXRL_DATA_DIR)"
TRIES = 5
TRY_S = 0.02
"""Delay between two tries to lock: `is_locked` of another process holds the lock for an instant."""


def data_dir_at(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a data directory; `~` is the user's home.

    Raises:
        StorageError: the path cannot be resolved.
    """
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise StorageError(
            f"the data directory {str(path)!r} cannot be found: {error}: {OTHERWISE}",
            path=str(path),
        ) from error


def make_data_dir(path: str | os.PathLike[str]) -> Path:
    """Make a data directory if it is missing, and close it to other users.

    Raises:
        PermissionDeniedError: it is another user's, a link, or another user could replace it.
        StorageError: it cannot be made or written.
    """
    folder = data_dir_at(path)
    try:
        make_private_folder(folder)
        (folder / LOCK).open("a").close()
    except StorageError as error:
        raise type(error)(f"{error.message}: {OTHERWISE}", path=str(folder)) from error
    except OSError as error:
        raise StorageError(
            f"nothing can be written to the data directory {folder}: {error}: {OTHERWISE}",
            path=str(folder),
        ) from error
    return folder


def try_lock(data_dir: Path) -> IO[str] | None:
    """Take the data directory's lock, which is held until the file is closed; None if a cluster
    has it."""
    file = (data_dir / LOCK).open("a+")
    for _ in range(TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(TRY_S)
        else:
            return file
    file.close()
    return None


def is_locked(data_dir: Path) -> bool:
    """Whether a cluster runs, starts or ends on the data directory."""
    try:
        file = (data_dir / LOCK).open()
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
