"""A tier's directory, locked by one process, and the header files in it.

The host tier's directory lies on a memory file system, so its files survive the daemon. The NVMe
tier's directory is persistent: a file is flushed before it is renamed.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from plexrl.errors import ConflictError, CorruptStateError, StorageError
from plexrl.process.folders.durable_files import create_durably, rename_durably
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.statemanager.layout.versions import VersionRecord, decode_header, encode_header
from plexrl.statemanager.store import disk_space
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.fault_points import FaultPoints

LOG = logging.getLogger(__name__)

PART_SUFFIX = ".part"

_SUFFIX = ".version"


class Tier:
    """A locked directory of version headers, next to the objects that they refer to."""

    def __init__(self, name: TierName, directory: Path, faults: FaultPoints | None = None) -> None:
        self.name = name
        self.directory = directory
        self.faults = faults or FaultPoints()
        make_private_folder(directory)
        self._lock_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            raise ConflictError(
                f"{directory} is in use by another StateManager: give each its own directory"
            ) from error
        for path in directory.glob(f"*{PART_SUFFIX}"):
            path.unlink()

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._lock_fd)

    def headers(self) -> Iterator[tuple[VersionRecord, int]]:
        """Every version with a header here, and the header's size; deletes damaged headers."""
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            try:
                contents = path.read_bytes()
                yield decode_header(contents), len(contents)
            except (OSError, CorruptStateError) as error:
                LOG.warning("the header %s is damaged and was removed (%s)", path, error)
                path.unlink(missing_ok=True)

    def write_header(self, record: VersionRecord, move: str) -> None:
        """Write a version's header, which makes the version stored here. Raises as
        `prepare_header`."""
        self.prepare_header(record, move)
        self.commit_header(record, move)

    def prepare_header(self, record: VersionRecord, move: str) -> None:
        """Write a version's header under a temporary name. `move` names the fault points.

        Raises:
            StateTierFullError: the file system is full; nothing is left behind.
            StorageError: the header cannot be written; nothing is left behind.
        """
        part = self._path(record).with_suffix(PART_SUFFIX)
        try:
            part.unlink(missing_ok=True)
            create_durably(part, encode_header(record))
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self.write_error(error) from error
        self.faults.reach(f"{move}.header")

    def commit_header(self, record: VersionRecord, move: str) -> None:
        """Rename a prepared header. Raises StorageError: it failed; nothing is left behind."""
        path = self._path(record)
        part = path.with_suffix(PART_SUFFIX)
        try:
            rename_durably(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self.write_error(error) from error
        self.faults.reach(f"{move}.named")

    def discard_header(self, record: VersionRecord) -> None:
        """Delete a prepared header."""
        self._path(record).with_suffix(PART_SUFFIX).unlink(missing_ok=True)

    def delete_header(self, record: VersionRecord) -> None:
        """Delete a version's header."""
        self._path(record).unlink(missing_ok=True)

    def write_error(self, error: OSError) -> StorageError:
        """The error for a failed write to this tier."""
        what = f"the {self.name} tier {self.directory}"
        return disk_space.write_error(what, error, tier=self.name.value)

    def _path(self, record: VersionRecord) -> Path:
        return self.directory / f"{record.manifest.file_name}{_SUFFIX}"
