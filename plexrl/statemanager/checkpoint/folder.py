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
    """The folder of the checkpoints of a deployment's job.

    Raises:
        InvalidRequestError: checkpoint_dir is not set, or the job's name cannot name a directory.
    """
    if not root:
        raise InvalidRequestError(
            "this StateManager has no checkpoint_dir: set one in its configuration"
        )
    job, _, _ = deployment.rpartition("/")
    return Path(root) / checked_name(job)


def checked_name(name: str) -> str:
    """The name, checked to be usable for a directory.

    Raises:
        InvalidRequestError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} is not a valid checkpoint or job name: use letters, digits, `.`, `_` and `-`"
        )
    return name


def complete_checkpoints(folder: Path) -> Iterator[tuple[Path, CheckpointRecord]]:
    """Every complete checkpoint of a job, by name; damaged ones are skipped."""
    for path in sorted(folder.glob(f"*/{RECORD}")):
        if path.parent.name.startswith("."):
            continue
        try:
            yield path.parent, read_record(path.parent)
        except PlexRLError as error:
            LOG.warning("%s is skipped: %s", path.parent, error)


def retain(folder: Path, policy: RetentionPolicy, node: str, in_use: frozenset[str]) -> list[str]:
    """Delete the checkpoints that the policy does not keep; returns their names."""
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
    """Remove unfinished checkpoints of an earlier daemon of this node."""
    for folder in _job_folders(root):
        for left in sweep(folder, node):
            LOG.warning("%s was unfinished; removed", left)


def to_upload(root: str, node: str) -> Iterator[Path]:
    """The complete checkpoints that this node wrote and has to upload."""
    for folder in _job_folders(root):
        for path, record in complete_checkpoints(folder):
            if record.upload and record.node == node:
                yield path


def _job_folders(root: str) -> list[Path]:
    return sorted(path for path in Path(root).glob("*") if path.is_dir()) if root else []
