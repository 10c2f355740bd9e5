"""Copies the rows of a job's metrics to its trackers, in a thread of the controller."""

import atexit
import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from plexrl.client.trackers.tracker import TrackedRun, Tracker, check_trackers, open_tracker
from plexrl.errors import ControllerReplacedError, InvalidRequestError, StorageError
from plexrl.wire.messages.views import MetricsRow

LOG = logging.getLogger(__name__)

FOLDER = "runs"
"""Folder of the trackers' files, in the controller's working directory."""
CLOSE_S = 60.0
"""Longest wait for the trackers at the end of a controller."""
LOCK_RETRY_S = 0.2
POLL_S = 5.0
"""Longest time between two reads of the job's metrics."""
WAITS_SAID_S = 5.0
"""A wait for another writer of the run is logged after so long."""

ReadRows = Callable[[int], Sequence[MetricsRow]]
"""Reads the rows after an index."""


class TrackerFeed:
    """The trackers of one job in this process. Errors of a tracker are logged; they never disturb
    the controller, and are tried again with the next row."""

    def __init__(self, run: TrackedRun, names: Sequence[str], read: ReadRows) -> None:
        """Begins to copy the rows that the trackers lack. Raises `StorageError`."""
        self._run = run
        self._names = tuple(names)
        self._read = read
        self._pid = os.getpid()
        self._new = threading.Event()
        self._closing = False
        self._outcome: str | None = None
        self._trackers: dict[str, tuple[Tracker, int]] = {}
        """By name: the open run, and the index of its last row."""
        self._read_to = 0
        """Index of the last row that was read."""
        self._said: set[str] = set()
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            # Keeps its names, so that a later controller continues the same trackers. Unbuffered:
            # a child could not close it if this process forks while its buffer is in use.
            self._lock = record_path(run.folder, run.job).open("ab", buffering=0)
        except OSError as error:
            raise StorageError(
                f"the folder of trackers cannot be written ({error}): set PLEXRL_TRACKER_DIR"
            ) from error
        _closed_in_forks().add(self._lock)
        self._thread = threading.Thread(target=self._copy_guarded, daemon=True, name="trackers")
        self._thread.start()
        atexit.register(self.close)

    def copied(self, name: str) -> int:
        """Index of the last row that the tracker has from this controller; 0: it is not open."""
        return self._trackers[name][1] if name in self._trackers else 0

    def wake(self) -> None:
        """Tell that the job has new rows."""
        self._new.set()

    def close(self, outcome: str | None = None) -> None:
        """Copy the last rows and close the runs, for at most `CLOSE_S` seconds."""
        if self._pid != os.getpid() or self._closing:
            return
        atexit.unregister(self.close)
        self._outcome = outcome
        self._closing = True
        self._new.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            LOG.warning(
                "the trackers of %s have not ended after %.0f s: rows that they lack are copied "
                "when the job is attached again in this folder",
                *(self._run.job, CLOSE_S),
            )

    def _copy_guarded(self) -> None:
        try:
            self._copy()
        except OSError as error:
            LOG.warning("the metrics of %s are copied no more: %s", self._run.job, error)

    def _copy(self) -> None:
        with self._lock as lock:
            if not self._is_locked(lock):
                return
            lock.truncate(0)
            lock.write(json.dumps(list(self._names)).encode())
            try:
                is_last = False
                while not is_last:
                    is_last = self._closing
                    self._copy_new()
                    if not self._closing:
                        # Also without new rows, to learn that another controller has replaced this.
                        self._new.wait(POLL_S)
                    self._new.clear()
            except ControllerReplacedError:
                LOG.info("the trackers of %s are its new controller's", self._run.job)
            finally:
                self._close_all()

    def _is_locked(self, lock: FileIO) -> bool:
        """Wait until no other process of this machine writes the run; whether it is so."""
        waited_s = 0.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if self._closing:
                    return False
            if waited_s < WAITS_SAID_S <= waited_s + LOCK_RETRY_S:
                LOG.warning("the trackers of %s wait for its earlier controller", self._run.job)
            waited_s += LOCK_RETRY_S
            threading.Event().wait(LOCK_RETRY_S)

    def _copy_new(self) -> None:
        """Copy the rows that each tracker lacks."""
        for name in self._names:
            if name not in self._trackers:
                self._open(name)
        # Also if no tracker is open, to learn that another controller has replaced this.
        first = min((last for _, last in self._trackers.values()), default=self._read_to)
        try:
            rows = self._read(first)
        except ControllerReplacedError:
            raise
        except Exception as error:
            self._warn("the rows of the job's metrics", error)
            return
        if rows:
            self._read_to = rows[-1]["index"]
        for name, (tracker, last) in list(self._trackers.items()):
            missing = [row for row in rows if row["index"] > last]
            if not missing:
                continue
            try:
                tracker.write(missing)
                self._trackers[name] = tracker, missing[-1]["index"]
            except Exception as error:
                # Opened again, it says itself which rows it has.
                del self._trackers[name]
                self._warn(f"tracker {name}", error)

    def _open(self, name: str) -> None:
        try:
            tracker = open_tracker(name, self._run)
            self._trackers[name] = tracker, tracker.last_row()
            self._end_before_libraries()
        except Exception as error:
            self._warn(f"tracker {name}", error)

    def _end_before_libraries(self) -> None:
        """Close at exit before what a tracker's library does at exit: it registered that when it
        opened the run, and the last registered function is called first."""
        if not self._closing:
            atexit.unregister(self.close)
            atexit.register(self.close)

    def _close_all(self) -> None:
        for name, (tracker, _) in self._trackers.items():
            try:
                tracker.close(self._outcome)
            except Exception as error:
                self._warn(f"tracker {name}", error)

    def _warn(self, what: str, error: Exception) -> None:
        text = f"{what} failed: {type(error).__name__}: {error}"
        if text not in self._said:
            self._said.add(text)
            LOG.warning("%s; it is tried again with the next row", text)


def record_path(folder: Path, job: str) -> Path:
    """The file that one writer of the job's runs locks, with the names of the trackers."""
    return folder / f"{job}.trackers.json"


class ChosenTrackers:
    """The trackers that a controller asks for, and the folder of their files."""

    def __init__(self, names: Sequence[str] | None, environment: Mapping[str, str]) -> None:
        """`names` go before `PLEXRL_TRACKERS` of the `environment`. Raises as `check_trackers`."""
        asked = environment.get("PLEXRL_TRACKERS") if names is None else names
        self._names = None if asked is None else check_trackers(asked)
        self.folder = Path(environment.get("PLEXRL_TRACKER_DIR") or FOLDER)

    def names_for(self, job: str) -> tuple[str, ...]:
        """The trackers of the job: those asked for, else those of its earlier controller here."""
        if self._names is not None:
            return self._names
        try:
            found = json.loads(record_path(self.folder, job).read_text() or "[]")
            return check_trackers([str(name) for name in found])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, InvalidRequestError) as error:
            LOG.warning("the trackers of %s are not continued: %s", job, error)
            return ()


@cache
def _closed_in_forks() -> "WeakSet[FileIO]":
    """Locks of this process: forks that outlive it would keep them. All have one handler, because
    none can be removed."""
    locks: WeakSet[FileIO] = WeakSet()

    def close() -> None:
        for lock in list(locks):
            lock.close()

    os.register_at_fork(after_in_child=close)
    return locks
