"""Atomic publication of directories: after a crash each is complete or absent.

A checkpoint `name` is written as `.name.<node>.part` and atomically exchanged with the previous one
if the file system supports that. If not (network file systems), the previous one is briefly renamed
to `.name.<node>.old`, and `sweep` restores it after a crash at that moment.
"""

import ctypes
import errno
import glob
import os
import shutil
from contextlib import suppress
from pathlib import Path

from plexrl.errors import CheckpointExistsError
from plexrl.process.folders.durable_files import (
    flush,
    flush_tree,
    make_folders_durably,
    rename_durably,
)
from plexrl.statemanager.store.disk_space import checkpoint_write_error

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def part_of(target: Path, node: str) -> Path:
    """The temporary directory of the checkpoint `target`."""
    return target.with_name(f".{target.name}.{node}.part")


def announce(target: Path, node: str) -> None:
    """Create the temporary directory, which shows all nodes that the checkpoint is being written.

    Raises:
        StorageFullError: the file system has no space for the directory.
        StorageError: the directory cannot be written.
    """
    part = part_of(target, node)
    try:
        make_folders_durably(part)
    except OSError as error:
        raise checkpoint_write_error(f"the folder {target.parent}", error, str(part)) from error


def begin(part: Path) -> None:
    """Create or empty the temporary directory. It is not removed: loads that wait look for it.

    Raises:
        OSError: it cannot be created.
    """
    make_folders_durably(part)
    for left in part.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def announce_end(target: Path, node: str) -> None:
    """Remove the temporary directory; a published checkpoint stays."""
    gone = _gone(target, node)
    shutil.rmtree(gone, ignore_errors=True)
    # It loses its name first: a writer that lives in spite of all publishes it whole or not at all.
    with suppress(OSError):
        part_of(target, node).rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def renew(target: Path, node: str) -> None:
    """Change the times of the temporary directory. Raises `OSError`."""
    with suppress(FileNotFoundError):
        os.utime(part_of(target, node))


def announced(target: Path) -> dict[str, str]:
    """The nodes that write, or will write, a checkpoint of that name, with a text that `renew`
    changes."""
    found = {}
    prefix = f".{target.name}."
    for part in target.parent.glob(f"{glob.escape(prefix)}*.part"):
        with suppress(FileNotFoundError):
            # An NFS client asks the server for the times of what it opens.
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found[part.name[len(prefix) : -len(".part")]] = str(os.fstat(fd).st_mtime_ns)
            finally:
                os.close(fd)
    return found


def publish(part: Path, target: Path, node: str, *, overwrite: bool) -> None:
    """Give a complete directory its name. A reader finds the previous one, this one, or none yet.

    Raises:
        CheckpointExistsError: the name exists, and `overwrite` is not set.
        OSError: the file system failed; the previous checkpoint is unchanged.
    """
    flush_tree(part)
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
            # Another process created or removed it meanwhile.
            if not part.exists():
                raise
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            _replace(part, target, node)
            break
    flush(target.parent)
    # After an exchange this is the previous checkpoint.
    shutil.rmtree(part, ignore_errors=True)


def share(source: Path, target: Path, node: str) -> None:
    """Publish the checkpoint `source` under the name `target` too. Both have the same files, by
    hard links: files of a published checkpoint never change, and the bytes stay until both are
    deleted. Callers with the same `node` and `target` take turns.

    Raises:
        CheckpointExistsError: the name exists.
        FileNotFoundError: `source` was deleted.
        OSError: the file system failed, or has no hard links.
    """
    part = part_of(target, node)
    begin(part)
    try:
        _link_all(source, part)
        publish(part, target, node, overwrite=False)
    finally:
        announce_end(target, node)


def _link_all(source: Path, part: Path) -> None:
    """Link all files of one version of `source`, which others may replace or delete meanwhile."""
    while True:
        version = _version(source)
        try:
            shutil.copytree(source, part, copy_function=os.link, dirs_exist_ok=True)
        except OSError:
            # Raises if it was deleted.
            if _version(source) == version:
                raise
        else:
            if _version(source) == version:
                return
        # It was replaced: some files may be of the former version.
        begin(part)


def _version(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_ino, found.st_mtime_ns


def sweep(folder: Path, node: str) -> list[Path]:
    """Remove temporary directories of an earlier process of this node; returns their paths."""
    removed = []
    for old in sorted(folder.glob(f".*.{glob.escape(node)}.old")):
        target = old.with_name(old.name.removeprefix(".").removesuffix(f".{node}.old"))
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            removed.append(old)
        else:
            rename_durably(old, target)
    for suffix in ("part", "gone"):
        for left in sorted(folder.glob(f".*.{glob.escape(node)}.{suffix}")):
            shutil.rmtree(left, ignore_errors=True)
            removed.append(left)
    return removed


def delete(target: Path, node: str) -> None:
    """Remove a checkpoint. It loses its name first, so that no reader finds a part of it."""
    gone = _gone(target, node)
    shutil.rmtree(gone, ignore_errors=True)
    target.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _gone(target: Path, node: str) -> Path:
    return target.with_name(f".{target.name}.{node}.gone")


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
