"""The folders of a cluster that runs on one machine."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plexrl.process.folders.leftovers import claimed, empty, sweep
from plexrl.process.folders.private_folder import (
    is_private_folder,
    make_private_folder,
    remove_private_folder,
)

SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = Path("/tmp")
RUNTIME_PATH_MAX = 24
"""Longest path of a user's runtime directory that is used. The path of a Unix socket may have at
most 107 bytes, and the names of a node and a worker follow. `/run/user/<uid>` is never longer."""


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a cluster on one machine."""

    data: Path
    run: Path
    """Sockets and configurations; a short path, because socket paths must be short."""
    shared_memory: Path
    """Host tiers."""

    @property
    def parts_file(self) -> Path:
        """File that records the restarts of parts."""
        return self.run / "parts.json"

    @classmethod
    def of(cls, data_dir: Path) -> "Folders":
        """Folders named after the data directory, so that a killed cluster's leftovers are
        found."""
        data = data_dir.resolve()
        tag = hashlib.sha256(str(data).encode()).hexdigest()[:10]
        memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else TEMPORARY
        return cls(data, _runtime_folder() / f"plexrl-{tag}", memory / f"plexrl-{tag}")

    def make(self) -> None:
        """Create all folders, and remove the sockets of a killed cluster.

        Raises:
            PermissionDeniedError: another user owns a folder, or could replace it.
            StorageError: a folder cannot be created.
        """
        make_private_folder(self.data)
        # Checked before it is emptied, because another user may have created it.
        make_private_folder(self.run)
        empty(self.run)
        for folder in (self.run, self.shared_memory, self.data / "logs"):
            make_private_folder(folder)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Reserve the folders for this cluster while the block runs.

        Raises:
            ConflictError: another cluster uses one of them.
            PermissionDeniedError, StorageError: a folder cannot be created.
        """
        with claimed(self.run, self.data), claimed(self.shared_memory, self.data):
            yield

    def sweep(self) -> None:
        """Remove the leftovers of killed clusters."""
        sweep((TEMPORARY, self.run.parent), self.shared_memory.parent)

    def remove(self, *, with_host_tier: bool = True) -> None:
        """Remove the folders that must not outlive the cluster."""
        remove_private_folder(self.run)
        if with_host_tier:
            remove_private_folder(self.shared_memory)


def _runtime_folder() -> Path:
    """The parent of socket folders: the user's runtime directory if private and short, else
    /tmp."""
    found = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if found.is_absolute() and len(str(found)) <= RUNTIME_PATH_MAX and is_private_folder(found):
        return found
    return TEMPORARY
