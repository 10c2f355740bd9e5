"""Folders that no other local user may enter or replace.

Sockets, keys and model state lie in folders whose paths others can guess, some of them below /tmp
and /dev/shm, where everybody may make a folder first. So each such folder is checked before it is
used: it is a folder and no symbolic link, it belongs to this process's user, its mode is 0700, and
nobody else may rename it.
"""

import logging
import os
import shutil
import stat
from pathlib import Path

from plexrl.errors import NO_SPACE, PermissionDeniedError, StorageError, StorageFullError

LOG = logging.getLogger(__name__)

OTHERS = 0o077
"""Permissions of everybody but the owner."""


def make_private_folder(path: Path) -> None:
    """Make the folder where it is missing, check it, and close it to other users.

    A folder of ours that others could enter is set to 0700, with a line in the log.

    Raises:
        PermissionDeniedError: the folder is another user's, a link, or open to replacement.
        StorageError: the file system refuses to make it.
    """
    path = path.absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    """Remove a folder with its contents, unless it is another user's or a link."""
    if is_private_folder(path):
        shutil.rmtree(path, ignore_errors=True)


def is_private_folder(path: Path) -> bool:
    """Whether a folder of this user, closed to all others, stands at the path."""
    try:
        found = path.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & OTHERS


def _make(path: Path, parent: int) -> None:
    try:
        os.mkdir(path.name, mode=0o700, dir_fd=parent)
    except FileExistsError:
        _check_owner(path, os.stat(path.name, dir_fd=parent, follow_symlinks=False))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path.name, flags, dir_fd=parent)
    try:
        # Of what was opened: a name may have changed hands since.
        found = os.fstat(folder)
        _check_owner(path, found)
        if not found.st_mode & OTHERS:
            return
        mode = stat.S_IMODE(found.st_mode)
        os.fchmod(folder, mode & ~OTHERS)
        if os.fstat(folder).st_mode & OTHERS:
            raise PermissionDeniedError(
                f"{path} is open to other users (mode {mode:04o}), and its file system does not "
                "change that: use a folder on another file system",
                path=str(path),
            )
        LOG.warning("%s was open to other users (mode %04o): closed to them now", path, mode)
    finally:
        os.close(folder)


def _check_parent(path: Path, found: os.stat_result) -> None:
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise PermissionDeniedError(
            f"any user can replace {path}, because {path.parent} is writable for all (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): `chmod o-w` or `chmod +t` it, or use another "
            "folder",
            path=str(path),
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise PermissionDeniedError(
            f"{path} is {kind}: remove it, or use another folder", path=str(path)
        )
    if found.st_uid != os.geteuid():
        raise PermissionDeniedError(
            f"{path} belongs to user {found.st_uid}, not to this process's user {os.geteuid()}: "
            "have it removed, or use another folder",
            path=str(path),
        )


def _refused(path: Path, error: OSError) -> StorageError:
    kind = StorageFullError if error.errno in NO_SPACE else StorageError
    return kind(f"the folder {path} cannot be made or opened: {error}", path=str(path))
