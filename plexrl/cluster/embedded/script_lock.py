"""Which script starts an embedded cluster, and when the cluster ends: two file locks.

Both locks are files in the data directory, locked with `flock`. The kernel releases a process's
locks when it ends, also after `kill -9`.

`scripts`: every script that uses the data directory's cluster holds a *shared* lock, from before it
looks for a cluster until it closes its connection or ends. The supervisor of an embedded cluster
waits in a thread for the *exclusive* lock. It gets the lock when the last script has ended, ends
the cluster, and keeps the lock until it has ended itself. A script that starts meanwhile waits for
its shared lock. So no script joins a cluster that is about to end.

`lock`: a running cluster holds it, also that of `plexrl up` (`data_dir/folder.py`). If several
scripts find no cluster, the one that gets the exclusive lock starts one, and passes the locked file
to the supervisor. The others wait until that cluster can be reached. If its start fails, the lock
is free again, and the next script tries.

A process that a script has forked shares the script's lock, and counts as that script.
"""

import fcntl
import os
import time
from pathlib import Path

from plexrl.cluster.data_dir.folder import OTHERWISE, is_locked
from plexrl.errors import StorageError

NAME = "scripts"
POLL_S = 0.01
NOTICE_S_MAX = 5.0
"""Time in which a supervisor notices that no script is left. A killed supervisor never does, and
another cluster may run on the data directory by then."""


class ScriptLock:
    """One script's share in the cluster of a data directory."""

    def __init__(self, data_dir: Path) -> None:
        """Waits while the supervisor of a former cluster ends.

        Raises:
            StorageError: the lock file cannot be opened.
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
        """Whether this process took the lock; its forks must not release it."""
        return self._pid == os.getpid()

    def leave(self) -> bool:
        """Release the share in an embedded cluster. If this was the last script, wait until the
        cluster has ended. Returns whether it has."""
        deadline = time.monotonic() + NOTICE_S_MAX
        while is_locked(self._data_dir) and time.monotonic() < deadline:
            if self._locks(fcntl.LOCK_EX):
                # No script is left, and the supervisor's thread is about to notice.
                fcntl.flock(self._file, fcntl.LOCK_UN)
                time.sleep(POLL_S)
            elif self._locks(fcntl.LOCK_SH):
                self.close()
                return False
            else:
                # The supervisor holds the exclusive lock until it ends, or another script that
                # leaves holds it for an instant.
                fcntl.flock(self._file, fcntl.LOCK_SH)
        self.close()
        return not is_locked(self._data_dir)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()

    def _locks(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def wait_for_last_script(data_dir: Path) -> None:
    """Return once no script uses the cluster. The process then holds the exclusive lock until it
    ends."""
    descriptor = os.open(data_dir / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
