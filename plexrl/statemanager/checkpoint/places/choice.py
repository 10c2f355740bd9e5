"""The place of checkpoints that a path or URL names."""

from pathlib import Path

from plexrl.statemanager.checkpoint.places.directory import DirectoryPlace, DirectoryRoot
from plexrl.statemanager.checkpoint.places.place import CheckpointPlace, CheckpointRoot
from plexrl.storage.location import directory, is_url

Location = Path | str
"""A path, or a URL as text."""


def root_at(location: Location) -> CheckpointRoot:
    """The root of all jobs' checkpoints.

    Raises:
        InvalidRequestError: the package of the URL's protocol is not installed.
    """
    if not is_url(str(location)):
        return DirectoryRoot(directory(str(location)))
    from plexrl.statemanager.checkpoint.places.objects import ObjectRoot
    from plexrl.storage.object_store import ObjectStore

    return ObjectRoot(ObjectStore(str(location)))


def place_at(location: Location) -> CheckpointPlace:
    """The place of one checkpoint. Raises as `root_at`."""
    if not is_url(str(location)):
        return DirectoryPlace(directory(str(location)))
    root, job, name = str(location).rstrip("/").rsplit("/", 2)
    return root_at(root).place(job, name)
