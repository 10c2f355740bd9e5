"""Directories that are whole or absent, whatever ends the process that writes them.

A checkpoint `name` is written as `.name.<node>.part` and exchanged with the former one in one step
where the file system can do that. Where it cannot (network file systems), the former one is
`.name.<node>.old` for a moment, and `sweep` puts it back if that moment was the last.
"""

import ctypes
import errno
import glob
import os
import shutil
from pathlib import Path

from plexrl.errors import CheckpointExistsError
from plexrl.statemanager.store.disk_space import checkpoint_write_error

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def part_of(target: Path, node: str) -> Path:
    """Where the checkpoint that becomes `target` is written."""
    return target.with_name(f".{target.name}.{node}.part")


def announce(target: Path, node: str) -> None:
    """Let every node see that a checkpoint of that name is coming.

    Raises:
        StorageFullError: the file system has no room for the directory.
        StorageError: the directory cannot be written.
    """
    part = part_of(target, node)
    try:
        part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise checkpoint_write_error(f"the folder {target.parent}", error, str(part)) from error


def begin(part: Path) -> None:
    """Have the directory there and empty. It stays throughout, because a load waits by it.

    Raises:
        OSError: it cannot be made.
    """
    part.mkdir(parents=True, exist_ok=True)
    for left in part.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def announce_end(target: Path, node: str) -> None:
    """Let every node see that none is coming any more; a published one stays."""
    shutil.rmtree(part_of(target, node), ignore_errors=True)


def is_coming(target: Path) -> bool:
    """Whether some node writes, or will write, a checkpoint of that name."""
    return any(target.parent.glob(f".{glob.escape(target.name)}.*.part"))


def publish(part: Path, target: Path, node: str, *, overwrite: bool) -> None:
    """Give a whole directory its name; a reader finds the former one, this one, or neither yet.

    Raises:
        CheckpointExistsError: there is one of that name, and `overwrite` is not set.
        OSError: the file system refused; what was there is there.
    """
    sync_tree(part)
    while True:
        try:
            if target.exists():
                if not overwrite:
                    raise CheckpointExistsError(
                        f"checkpoint {target.name!r} exists: choose another name or set overwrite"
                    )
                _rename(part, target, _EXCHANGE)
            else:
                _rename(part, target, _NOREPLACE)
            break
        except (FileExistsError, FileNotFoundError):
            # Somebody else made or removed it meanwhile.
            if not part.exists():
                raise
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            _replace(part, target, node)
            break
    sync_directory(target.parent)
    # After an exchange this is the former checkpoint.
    shutil.rmtree(part, ignore_errors=True)


def sweep(folder: Path, node: str) -> list[Path]:
    """Remove what a former process of this node left in `folder`; returns what that was."""
    removed = []
    for old in sorted(folder.glob(f".*.{glob.escape(node)}.old")):
        target = old.with_name(old.name.removeprefix(".").removesuffix(f".{node}.old"))
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            removed.append(old)
        else:
            old.rename(target)
    for suffix in ("part", "gone"):
        for left in sorted(folder.glob(f".*.{glob.escape(node)}.{suffix}")):
            shutil.rmtree(left, ignore_errors=True)
            removed.append(left)
    return removed


def delete(target: Path, node: str) -> None:
    """Remove a checkpoint: its name first, so that no reader meets half of it."""
    gone = target.with_name(f".{target.name}.{node}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    target.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Have every file and directory below `folder` on the disk."""
    for path in folder.rglob("*"):
        sync_directory(path)
    sync_directory(folder)


def sync_directory(path: Path) -> None:
    """Have a file's contents, or a directory's names, on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(source: Path, target: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, "the C library has no renameat2")
    names = (os.fsencode(source), os.fsencode(target))
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def _replace(part: Path, target: Path, node: str) -> None:
    old = target.with_name(f".{target.name}.{node}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)
