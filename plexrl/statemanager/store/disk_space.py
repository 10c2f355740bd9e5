"""What a full file system is to the StateManager: a condition that passes, not a failure."""

import errno
from pathlib import Path

from plexrl.errors import NO_SPACE, StateTierFullError, StorageError, StorageFullError

_NO_ROOM = NO_SPACE | {errno.EFBIG, errno.ENOMEM}


def is_full(error: OSError) -> bool:
    """Whether the system refused a write because it has no room now."""
    return error.errno in _NO_ROOM


def replace_file(path: Path, contents: bytes) -> None:
    """Write a small file anew: it has the former contents or the new ones, whatever happens.

    Raises:
        StateTierFullError: the file system has no room; the former contents are there.
        StorageError: it cannot be written; the former contents are there.
    """
    part = path.with_suffix(".part")
    try:
        part.write_bytes(contents)
        part.rename(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise refused(f"the file {path}", error) from error


def checkpoint_refused(what: str, error: OSError, file: str) -> StorageError:
    """The error for a write to a checkpoint that the file system refused."""
    if is_full(error):
        return StorageFullError(
            f"{what} has no room on its file system ({error}): free space there; the checkpoint is "
            "written when there is room",
            file=file,
        )
    return StorageError(
        f"{what} cannot be written ({error}): mend its permissions or the file system; nothing of "
        "the checkpoint remains",
        file=file,
    )


def refused(what: str, error: OSError, **details: object) -> StorageError:
    """The error for a write that the file system refused; `what` names what was written to."""
    if is_full(error):
        return StateTierFullError(
            f"{what} has no room on its file system ({error}): free space there or lower the "
            "tier's bound; the state stays where it was",
            **details,
        )
    return StorageError(
        f"{what} cannot be written ({error}): mend the file system; the state stays where it was",
        **details,
    )
