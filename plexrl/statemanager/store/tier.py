"""One tier's directory, which one process at a time may use, and the header files in it.

The host tier's lies on a memory file system, so that what is there outlives the daemon. The NVMe
tier's is persistent: what is renamed there was synced before.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from plexrl.errors import ConflictError, CorruptStateError, StorageError
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.fault_points import FaultPoints
from plexrl.statemanager.store import disk_space
from plexrl.statemanager.store.versions.versions import VersionRecord, decode_header, encode_header

LOG = logging.getLogger(__name__)

PART_SUFFIX = ".part"

_SUFFIX = ".version"


class Tier:
    """A locked directory of version headers, beside what they speak of."""

    def __init__(self, name: TierName, directory: Path, faults: FaultPoints | None = None) -> None:
        self.name = name
        self.directory = directory
        self.faults = faults or FaultPoints()
        self._persistent = name == TierName.NVME
        make_private_folder(directory)
        self._lock_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            raise ConflictError(
                f"{directory} is in use by another StateManager: give each a directory of its own"
            ) from error
        for path in directory.glob(f"*{PART_SUFFIX}"):
            path.unlink()

    def close(self) -> None:
        """Let another process use the directory."""
        os.close(self._lock_fd)

    def sync(self) -> None:
        """Make renames in the directory durable, where it is persistent."""
        if self._persistent:
            os.fsync(self._lock_fd)

    def headers(self) -> Iterator[tuple[VersionRecord, int]]:
        """Every version named here, with the bytes of its header; a damaged one is deleted."""
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            try:
                contents = path.read_bytes()
                yield decode_header(contents), len(contents)
            except (OSError, CorruptStateError) as error:
                LOG.warning("%s is no version any more (%s); removed", path, error)
                path.unlink(missing_ok=True)

    def name_version(self, record: VersionRecord, move: str) -> None:
        """Write a version's header: it is stored here from now on. Raises as `prepare`."""
        self.prepare(record, move)
        self.commit(record, move)

    def prepare(self, record: VersionRecord, move: str) -> None:
        """Write a version's header under another name. `move` is for fault points.

        Raises:
            StateTierFullError: the file system has no room; nothing is left behind.
            StorageError: it cannot be written; nothing is left behind.
        """
        part = self._path(record).with_suffix(PART_SUFFIX)
        try:
            with part.open("wb") as file:
                file.write(encode_header(record))
                file.flush()
                if self._persistent:
                    os.fsync(file.fileno())
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self.refused(error) from error
        self.faults.reach(f"{move}.header")

    def commit(self, record: VersionRecord, move: str) -> None:
        """Give a header its name. Raises StorageError: that cannot be; nothing is left behind."""
        path = self._path(record)
        part = path.with_suffix(PART_SUFFIX)
        try:
            part.rename(path)
            self.sync()
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self.refused(error) from error
        self.faults.reach(f"{move}.named")

    def withdraw(self, record: VersionRecord) -> None:
        """Delete a header that was prepared."""
        self._path(record).with_suffix(PART_SUFFIX).unlink(missing_ok=True)

    def forget_version(self, record: VersionRecord) -> None:
        """Delete a version's header."""
        self._path(record).unlink(missing_ok=True)

    def refused(self, error: OSError) -> StorageError:
        """What to raise when the file system refuses to take something."""
        what = f"the {self.name} tier {self.directory}"
        return disk_space.refused(what, error, tier=self.name.value)

    def _path(self, record: VersionRecord) -> Path:
        return self.directory / f"{record.manifest.file_name}{_SUFFIX}"
