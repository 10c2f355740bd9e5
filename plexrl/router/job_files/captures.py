"""Captured calls of trajectories: what generated through the OpenAI-compatible endpoints.

    captures/<job>/<trajectory>/<call>.json

Each call is a file, or an object, of its own, written before the call is answered, so routers share
them without locks. A call that is repeated replaces its file by an equal one. A trajectory is
deleted as a whole some time after its last call.
"""

import asyncio
import logging
import os
import random
import shutil
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from plexrl.errors import PlexRLError, QuotaExceededError
from plexrl.process.folders.durable_files import create_durably, flush, rename_durably
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.router.blobs.upload import write_error
from plexrl.storage.object_store import ObjectStore

LOG = logging.getLogger(__name__)

CALLS_MAX = 1000
"""Calls of one trajectory."""
KEPT_S = 3600.0
"""How long a trajectory is kept after its last call."""
PERIOD_S = 600.0
"""Time between two deletions of old trajectories."""
MEASURED_S = 60.0
"""Time between two measurements of a job's bytes."""
JOBS_MAX = 1000
"""Jobs whose bytes are remembered."""
FOLDER = "captures"


class Uses:
    """Bytes of the captured calls of each job, measured once in a while and counted in between. So
    what other routers have added may be missing for `MEASURED_S` seconds. Thread-safe."""

    def __init__(self, job_bytes_max: int) -> None:
        self._job_bytes_max = job_bytes_max
        self._lock = threading.Lock()
        self._uses: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By job: until when it counts, by the monotonic clock, and the bytes."""

    def check(self, job: str, measure: Callable[[], int]) -> None:
        """Raises `QuotaExceededError` if the job has no room for a further call."""
        now = time.monotonic()
        with self._lock:
            until, used = self._uses.get(job, (0.0, 0))
        if until <= now:
            used = measure()
            with self._lock:
                self._uses[job] = (now + MEASURED_S, used)
                self._uses.move_to_end(job)
                while len(self._uses) > JOBS_MAX:
                    self._uses.popitem(last=False)
        if used >= self._job_bytes_max:
            raise QuotaExceededError(
                f"job {job!r} has {used} bytes of captured calls; the bound is "
                f"{self._job_bytes_max}: wait an hour after a trajectory's last call, or have the "
                "operator raise captures_job_bytes_max",
                used=used,
                quota=self._job_bytes_max,
            )

    def add(self, job: str, nbytes: int) -> None:
        """Count a call."""
        with self._lock:
            if job in self._uses:
                until, used = self._uses[job]
                self._uses[job] = (until, used + nbytes)


class Captures(Protocol):
    """Captured calls. A trajectory is named by its job, and by a name inside of it. The methods
    block."""

    def check(self, job: str, trajectory: str, call: str) -> None:
        """Check that a call may be added. One that is kept already may.

        Raises:
            QuotaExceededError: the trajectory has `CALLS_MAX` calls, or the job `job_bytes_max`
                bytes of them.
            StorageError, StoreUnavailableError: it cannot be read.
        """
        ...

    def add(self, job: str, trajectory: str, call: str, row: bytes) -> None:
        """Keep a call of a trajectory; it is durable when this returns.

        Raises:
            QuotaExceededError: as `check`.
            StorageError, StoreUnavailableError: it cannot be written.
        """
        ...

    def read(self, job: str, trajectory: str) -> list[bytes]:
        """All calls of a trajectory, in any order; empty: there are none. Raises
        `StoreUnavailableError`."""
        ...

    def discard(self, *, older_than_s: float) -> None:
        """Delete trajectories whose last call is older. Raises as `add`, and `OSError`."""
        ...


class CaptureFiles:
    """Captured calls in files under one directory, which all routers share."""

    def __init__(self, directory: Path, *, job_bytes_max: int) -> None:
        self._directory = directory
        self._uses = Uses(job_bytes_max)
        make_private_folder(directory)

    def check(self, job: str, trajectory: str, call: str) -> None:
        folder = self._folder(job, trajectory)
        try:
            if (folder / f"{quote(call, safe='')}.json").exists():
                return
            calls = sum(1 for _ in folder.iterdir()) if folder.exists() else 0
        except FileNotFoundError:
            calls = 0
        except OSError as error:
            raise write_error(self._directory, error) from error
        check_room(trajectory, calls)
        self._uses.check(job, lambda: _file_bytes(folder.parent))

    def add(self, job: str, trajectory: str, call: str, row: bytes) -> None:
        self.check(job, trajectory, call)
        folder = self._folder(job, trajectory)
        path = folder / f"{quote(call, safe='')}.json"
        part = folder / f"{uuid.uuid4().hex}.part"
        try:
            if not folder.exists():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                flush(self._directory)
            # Another call may have made the folder, and not have flushed it yet.
            flush(folder.parent)
            try:
                create_durably(part, row)
                rename_durably(part, path)
            except OSError:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise write_error(self._directory, error) from error
        self._uses.add(job, len(row))

    def read(self, job: str, trajectory: str) -> list[bytes]:
        found = []
        for path in self._folder(job, trajectory).glob("*.json"):
            with suppress(FileNotFoundError):
                found.append(path.read_bytes())
        return found

    def discard(self, *, older_than_s: float) -> None:
        # By the clock of the file system, which on a mount is another machine's.
        os.utime(self._directory)
        limit = self._directory.stat().st_mtime - older_than_s
        for folder in self._directory.glob("*/*"):
            # The folder changes with each call, also with one that is being written.
            with suppress(FileNotFoundError):
                if folder.stat().st_mtime < limit:
                    shutil.rmtree(folder)
        for folder in self._directory.iterdir():
            with suppress(OSError):
                if folder.stat().st_mtime < limit:
                    folder.rmdir()

    def _folder(self, job: str, trajectory: str) -> Path:
        return self._directory / quote(job, safe="") / quote(trajectory, safe="")


class CaptureObjects:
    """Captured calls in an object store."""

    def __init__(self, store: ObjectStore, *, job_bytes_max: int) -> None:
        self._store = store
        self._uses = Uses(job_bytes_max)

    def check(self, job: str, trajectory: str, call: str) -> None:
        folder = _key(job, trajectory)
        keys = {each.key for each in self._store.find(folder)}
        if f"{folder}/{quote(call, safe='')}.json" in keys:
            return
        check_room(trajectory, len(keys))
        below = folder.rpartition("/")[0]
        self._uses.check(job, lambda: sum(each.nbytes for each in self._store.find(below)))

    def add(self, job: str, trajectory: str, call: str, row: bytes) -> None:
        self.check(job, trajectory, call)
        folder = _key(job, trajectory)
        self._store.write(f"{folder}/{quote(call, safe='')}.json", row)
        self._uses.add(job, len(row))

    def read(self, job: str, trajectory: str) -> list[bytes]:
        found = []
        for each in self._store.find(_key(job, trajectory)):
            with suppress(FileNotFoundError):
                found.append(self._store.read(each.key))
        return found

    def discard(self, *, older_than_s: float) -> None:
        limit = time.time() - older_than_s
        newest: dict[str, float] = {}
        found = list(self._store.find(FOLDER))
        for each in found:
            folder = each.key.rpartition("/")[0]
            newest[folder] = max(newest.get(folder, 0.0), each.modified_s)
        self._store.delete(
            each.key for each in found if newest[each.key.rpartition("/")[0]] < limit
        )


def check_room(trajectory: str, calls: int) -> None:
    """Check that a trajectory may have one more call. Raises `QuotaExceededError`."""
    if calls >= CALLS_MAX:
        raise QuotaExceededError(
            f"trajectory {trajectory!r} has {calls} calls, which is the most: name another one",
            used=calls,
            quota=CALLS_MAX,
        )


def _file_bytes(folder: Path) -> int:
    found = 0
    for path in folder.glob("*/*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


async def collect_captures(captures: Captures) -> None:
    """Delete old trajectories, until cancelled."""
    while True:
        try:
            await asyncio.to_thread(captures.discard, older_than_s=KEPT_S)
        except (PlexRLError, OSError) as error:
            LOG.error("old captured trajectories were not deleted: %s", error)
        await asyncio.sleep(PERIOD_S * random.uniform(0.75, 1.25))


def _key(job: str, trajectory: str) -> str:
    return f"{FOLDER}/{quote(job, safe='')}/{quote(trajectory, safe='')}"
