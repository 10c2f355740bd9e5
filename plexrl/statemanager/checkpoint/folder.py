"""The checkpoints of one job: `<checkpoint_url>/<job>/<name>`."""

import logging
import re

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.statemanager.checkpoint.format.retention import (
    CheckpointAge,
    RetentionPolicy,
    deletable,
)
from plexrl.statemanager.checkpoint.places.place import CheckpointRoot

LOG = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def job_name(deployment: str) -> str:
    """The folder of a deployment's job.

    Raises:
        InvalidRequestError: the job's name cannot name a folder.
    """
    return checked_name(deployment.rpartition("/")[0])


def checked_name(name: str) -> str:
    """The name, checked to be usable for a folder.

    Raises:
        InvalidRequestError: it is not.
    """
    if not is_name(name):
        raise InvalidRequestError(
            f"{name!r} is not a valid checkpoint or job name: use letters, digits, `.`, `_` and `-`"
        )
    return name


def is_name(name: str) -> bool:
    """Whether a job's folder or a checkpoint may have this name."""
    return _NAME.fullmatch(name) is not None


def retain(
    root: CheckpointRoot, job: str, policy: RetentionPolicy, node: str, in_use: frozenset[str]
) -> list[str]:
    """Delete the checkpoints that the policy does not keep; returns their names. Raises `OSError`
    and `PlexRLError`."""
    ages = [
        CheckpointAge(
            step=record.step,
            written_ns=place.written_ns(),
            name=place.name,
            is_pinned=record.keep or place.name in in_use,
            nbytes=sum(file.nbytes for file in record.files),
        )
        for place, record in root.complete(job)
    ]
    gone = []
    for age in deletable(ages, policy):
        place = root.place(job, age.name)
        try:
            place.delete(node)
        except (OSError, PlexRLError) as error:
            LOG.warning("checkpoint %s was not deleted: %s", place, error)
            continue
        gone.append(age.name)
    root.collect_garbage(job)
    return gone
