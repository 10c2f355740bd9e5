"""Errors of the file system: a full one is a temporary condition, not a failure."""

import errno
from pathlib import Path

from plexrl.errors import NO_SPACE, StateTierFullError, StorageError, StorageFullError
from plexrl.process.folders.durable_files import write_durably

_FULL = NO_SPACE | {errno.EFBIG, errno.ENOMEM}


def is_full(error: OSError) -> bool:
    """Whether a write failed because the file system or memory is full."""
    return error.errno in _FULL


def replace_file(path: Path, contents: bytes) -> None:
    """Replace a small file atomically and durably.

    Raises:
        StateTierFullError: the file system is full; the file is unchanged.
        StorageError: the file cannot be written and is unchanged.
    """
    try:
        write_durably(path, contents)
    except OSError as error:
        raise write_error(f"the file {path}", error) from error


def checkpoint_write_error(what: str, error: OSError, file: str) -> StorageError:
    """The error for a failed write to a checkpoint."""
    if is_full(error):
        return StorageFullError(
            f"{what} does not fit, its file system is full ({error}): free space there; the "
            "checkpoint is written then",
            file=file,
        )
    return StorageError(
        f"{what} cannot be written ({error}): repair its permissions or the file system; nothing "
        "of the checkpoint remains",
        file=file,
    )


def write_error(what: str, error: OSError, **details: object) -> StorageError:
    """The error for a failed write; `what` names the file or tier."""
    if is_full(error):
        return StateTierFullError(
            f"{what}: the file system is full ({error}): free space there or lower the "
            "tier's capacity; the state stays where it was",
            **details,
        )
    return StorageError(
        f"{what} cannot be written ({error}): repair the file system; the state stays where it was",
        **details,
    )
