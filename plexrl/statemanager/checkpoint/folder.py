"""The checkpoints of one job: `<checkpoint_dir>/<job>/<name>/`."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.statemanager.checkpoint.format.record import RECORD, CheckpointRecord
from plexrl.statemanager.checkpoint.format.retention import (
    CheckpointAge,
    RetentionPolicy,
    deletable,
)
from plexrl.statemanager.checkpoint.restore import read_record
from plexrl.statemanager.checkpoint.write.publish import delete, sweep

LOG = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def job_folder(root: str, deployment: str) -> Path:
    """Where the checkpoints of a deployment's job are.

    Raises:
        InvalidRequestError: no checkpoints are kept here, or the job's name is no directory's.
    """
    if not root:
        raise InvalidRequestError(
            "this StateManager has no checkpoint_dir: set one in its configuration"
        )
    job, _, _ = deployment.rpartition("/")
    return Path(root) / checked_name(job)


def checked_name(name: str) -> str:
    """The name, if it can be a directory's.

    Raises:
        InvalidRequestError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} names no checkpoint or job: use letters, digits, `.`, `_` and `-`"
        )
    return name


def complete_checkpoints(folder: Path) -> Iterator[tuple[Path, CheckpointRecord]]:
    """Every whole checkpoint of a job, by name; damaged ones are passed over."""
    for path in sorted(folder.glob(f"*/{RECORD}")):
        if path.parent.name.startswith("."):
            continue
        try:
            yield path.parent, read_record(path.parent)
        except PlexRLError as error:
            LOG.warning("%s is passed over: %s", path.parent, error)


def retain(folder: Path, policy: RetentionPolicy, node: str, in_use: frozenset[str]) -> list[str]:
    """Delete what the policy lets go; returns the names of what went."""
    ages = [
        CheckpointAge(
            step=record.step,
            written_ns=(path / RECORD).stat().st_mtime_ns,
            name=path.name,
            is_pinned=record.keep or path.name in in_use,
        )
        for path, record in complete_checkpoints(folder)
    ]
    gone = []
    for age in deletable(ages, policy):
        try:
            delete(folder / age.name, node)
        except OSError as error:
            LOG.warning("checkpoint %s was not deleted: %s", folder / age.name, error)
            continue
        gone.append(age.name)
    return gone


def clean_up(root: str, node: str) -> None:
    """Remove what a former daemon of this node left unfinished."""
    for folder in _job_folders(root):
        for left in sweep(folder, node):
            LOG.warning("%s was not finished; removed", left)


def to_upload(root: str, node: str) -> Iterator[Path]:
    """The whole checkpoints that this node wrote and was asked to upload."""
    for folder in _job_folders(root):
        for path, record in complete_checkpoints(folder):
            if record.upload and record.node == node:
                yield path


def _job_folders(root: str) -> list[Path]:
    return sorted(path for path in Path(root).glob("*") if path.is_dir()) if root else []
