"""Who starts an embedded cluster, and who ends it: scripts that know each other by two locks.

Both locks are files in the data directory, locked with `flock`. The kernel gives a process's locks
back when it ends, also by `kill -9`.

`scripts`: every script that uses the data directory's cluster holds a *shared* lock, from before it
looks for a cluster until it closes its connection or ends. The supervisor of an embedded cluster
waits in a thread for the *exclusive* lock. It gets that lock when the last script is gone, ends the
cluster, and keeps the lock until it has ended itself. A script that comes meanwhile waits for its
shared lock, so no script joins a cluster that is about to end, and none is left without one.

`lock`: a running cluster holds it, that of `plexrl up` too (`data_dir.py`). Of several scripts that
find no cluster, the one that gets the exclusive lock starts one, and hands the locked file to the
supervisor. The others wait until that cluster can be reached. If its start fails the lock is free
again, and the next script tries.

A process that a script has forked shares the script's lock, and counts as that script.
"""

import fcntl
import os
import time
from pathlib import Path

from plexrl.cluster.data_dir import OTHERWISE, is_locked
from plexrl.errors import StorageError

NAME = "scripts"
LOOK_S = 0.01
NOTICE_S_MAX = 5.0
"""In which a supervisor notices that no script is left. One that was killed never does, and another
cluster may run on the data directory by then."""


class ScriptLock:
    """One script's share in the cluster of a data directory."""

    def __init__(self, data_dir: Path) -> None:
        """Waits while a former cluster's supervisor ends.

        Raises:
            StorageError: the lock's file cannot be opened.
        """
        try:
            self._file = (data_dir / NAME).open("a+")
        except OSError as error:
            raise StorageError(
                f"{data_dir / NAME} cannot be opened: {error}: {OTHERWISE}", path=str(data_dir)
            ) from error
        self._data_dir = data_dir
        self._pid = os.getpid()
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @property
    def is_own(self) -> bool:
        """Whether this process took the lock; a fork of that process must not give it back."""
        return self._pid == os.getpid()

    def leave(self) -> bool:
        """Give the share in an embedded cluster up. If this was the last script, wait until the
        cluster has ended; whether it has."""
        deadline = time.monotonic() + NOTICE_S_MAX
        while is_locked(self._data_dir) and time.monotonic() < deadline:
            if self._locks(fcntl.LOCK_EX):
                # Nobody else is left, and the supervisor's thread is about to notice.
                fcntl.flock(self._file, fcntl.LOCK_UN)
                time.sleep(LOOK_S)
            elif self._locks(fcntl.LOCK_SH):
                self.close()
                return False
            else:
                # The supervisor has the exclusive lock to its end; another script that leaves, for
                # an instant.
                fcntl.flock(self._file, fcntl.LOCK_SH)
        self.close()
        return not is_locked(self._data_dir)

    def close(self) -> None:
        """Give the lock back."""
        self._file.close()

    def _locks(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def wait_for_last_script(data_dir: Path) -> None:
    """Return once no script uses the cluster. This process keeps the exclusive lock to its end."""
    descriptor = os.open(data_dir / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
