"""Errors of the file system: a full one is a temporary condition, not a failure."""

import errno
from pathlib import Path

from plexrl.errors import (
    StateTierFullError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from plexrl.process.folders.disk_errors import AWAY, FAILING, NO_SPACE
from plexrl.process.folders.durable_files import write_durably

_FULL = NO_SPACE | {errno.EFBIG, errno.ENOMEM}


def is_full(error: OSError) -> bool:
    """Whether a write failed because the file system or memory is full."""
    return error.errno in _FULL


def held_error(error: BaseException, what: str) -> StorageError | None:
    """The error of a condition that ends once an operator acts, if `error` is one of a full or a
    failing disk; `what` begins its message."""
    if not isinstance(error, OSError):
        return None
    if is_full(error):
        return StorageFullError(f"{what}: no space is left ({error}): free space there")
    if error.errno in FAILING:
        return StorageUnavailableError(
            f"{what}: the disk fails ({error}): repair or mount it again"
        )
    return None


def replace_file(path: Path, contents: bytes) -> None:
    """Replace a small file atomically and durably.

    Raises:
        StateTierFullError: the file system is full; the file is unchanged.
        StorageUnavailableError: the file system fails or is away; the file is unchanged.
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
    kind = StorageUnavailableError if error.errno in AWAY else StorageError
    return kind(
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
    kind = StorageUnavailableError if error.errno in AWAY else StorageError
    return kind(
        f"{what} cannot be written ({error}): repair the file system; the state stays where it was",
        **details,
    )
