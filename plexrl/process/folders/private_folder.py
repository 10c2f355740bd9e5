"""Folders that no other local user can enter or replace.

Sockets, keys and model state are in folders with predictable paths. Some are in /tmp and /dev/shm,
where any user may create a folder first. So each folder is checked before use: it is a folder and
not a symbolic link, it belongs to this process's user, its mode is 0700, and no other user may
rename it.
"""

import logging
import os
import shutil
import stat
from pathlib import Path

from plexrl.errors import PermissionDeniedError, StorageError, StorageFullError
from plexrl.process.folders.disk_errors import NO_SPACE
from plexrl.process.folders.durable_files import flush, make_folders_durably

LOG = logging.getLogger(__name__)

OTHERS = 0o077
"""Permission bits of all users except the owner."""


def make_private_folder(path: Path) -> None:
    """Create the folder durably if it is missing, check it, and close it to other users.

    If others could enter a folder of this user, its mode is set to 0700 and a warning is logged.

    Raises:
        PermissionDeniedError: the folder belongs to another user, is a link, or could be replaced.
        StorageError: the file system refuses to create it.
    """
    path = path.absolute()
    try:
        make_folders_durably(path.parent)
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        _check_parent(path, os.fstat(parent))
        _make(path, parent)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        os.close(parent)


def remove_private_folder(path: Path) -> None:
    """Remove a folder with its contents, if it is a private folder of this user."""
    if is_private_folder(path):
        shutil.rmtree(path, ignore_errors=True)


def is_private_folder(path: Path) -> bool:
    """Whether the path is a folder of this user, closed to all others."""
    try:
        found = path.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & OTHERS


def _make(path: Path, parent: int) -> None:
    try:
        os.mkdir(path.name, mode=0o700, dir_fd=parent)
        flush(path.parent)
    except FileExistsError:
        _check_owner(path, os.stat(path.name, dir_fd=parent, follow_symlinks=False))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path.name, flags, dir_fd=parent)
    try:
        # Checks the opened folder, because the path may have been replaced since.
        found = os.fstat(folder)
        _check_owner(path, found)
        if not found.st_mode & OTHERS:
            return
        mode = stat.S_IMODE(found.st_mode)
        os.fchmod(folder, mode & ~OTHERS)
        if os.fstat(folder).st_mode & OTHERS:
            raise PermissionDeniedError(
                f"{path} is open to other users (mode {mode:04o}), and its file system does not "
                "change the mode: use a folder on another file system",
                path=str(path),
            )
        LOG.warning("%s was open to other users (mode %04o): closed it", path, mode)
    finally:
        os.close(folder)


def _check_parent(path: Path, found: os.stat_result) -> None:
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise PermissionDeniedError(
            f"any user can replace {path}, because {path.parent} is writable for all (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): run `chmod o-w` or `chmod +t` on it, or use "
            "another folder",
            path=str(path),
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        raise PermissionDeniedError(
            f"{path} is {kind}: remove it, or use another folder", path=str(path)
        )
    if found.st_uid != os.geteuid():
        raise PermissionDeniedError(
            f"{path} belongs to user {found.st_uid}, not to this process's user {os.geteuid()}: "
            "ask that user to remove it, or use another folder",
            path=str(path),
        )


def _refused(path: Path, error: OSError) -> StorageError:
    kind = StorageFullError if error.errno in NO_SPACE else StorageError
    return kind(
        f"the folder {path} cannot be created or opened ({error}): fix this or use another folder",
        path=str(path),
    )
