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
"""Longest path of a user's runtime directory that is used: the kernel takes at most 107 bytes for
the path of a Unix socket, and a node's and a worker's names are still to come. `/run/user/<uid>`
is never longer."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where an embedded cluster keeps its things."""

    data: Path
    run: Path
    """Sockets and configurations; a short path, since socket paths are."""
    shared_memory: Path
    """Host tiers."""

    @property
    def parts_file(self) -> Path:
        """Record of which parts were started again."""
        return self.run / "parts.json"

    @classmethod
    def of(cls, data_dir: Path) -> "Folders":
        """Named after the data directory, so that what a killed cluster left can be found."""
        data = data_dir.resolve()
        tag = hashlib.sha256(str(data).encode()).hexdigest()[:10]
        memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else TEMPORARY
        return cls(data, _runtime_folder() / f"plexrl-{tag}", memory / f"plexrl-{tag}")

    def make(self) -> None:
        """Make all of them; what a killed cluster left of the sockets is removed.

        Raises:
            PermissionDeniedError: another user owns one of them, or could replace it.
            StorageError: one cannot be made.
        """
        make_private_folder(self.data)
        # Checked before it is emptied: another user may have made it.
        make_private_folder(self.run)
        empty(self.run)
        for folder in (self.run, self.shared_memory, self.data / "logs"):
            make_private_folder(folder)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Have the folders belong to this cluster for as long as the block lasts.

        Raises:
            ConflictError: another cluster has one of them.
            PermissionDeniedError, StorageError: one cannot be made.
        """
        with claimed(self.run, self.data), claimed(self.shared_memory, self.data):
            yield

    def sweep(self) -> None:
        """Remove what clusters left that were killed."""
        sweep((TEMPORARY, self.run.parent), self.shared_memory.parent)

    def remove(self) -> None:
        """Remove what must not outlive the cluster."""
        remove_private_folder(self.run)
        remove_private_folder(self.shared_memory)


def _runtime_folder() -> Path:
    """Where sockets lie: the user's runtime directory if it is safe and short, else /tmp."""
    told = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if told.is_absolute() and len(str(told)) <= RUNTIME_PATH_MAX and is_private_folder(told):
        return told
    return TEMPORARY
