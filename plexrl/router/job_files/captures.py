"""Captured calls of trajectories: what generated through the OpenAI-compatible endpoints.

    captures/<tenant>/<job>/<trajectory>/<call>.json

Each call is a file, or an object, of its own, written before the call is answered, so routers share
them without locks. A call that is repeated replaces its file by an equal one. A trajectory is
deleted as a whole some time after its last call.
"""

import threading
import time
from collections import OrderedDict

from plexrl.errors import QuotaExceededError
from plexrl.router.job_files.record_store import JobKey, RecordStore, file_name

CALLS_MAX = 1000
"""Calls of one trajectory."""
MEASURED_S = 60.0
"""Time between two measurements of a job's bytes."""
JOBS_MAX = 1000
"""Jobs whose bytes are remembered."""
FOLDER = "captures"


class Captures:
    """Captured calls of all jobs. A trajectory is named by its job, and by a name inside of it. The
    methods block, and raise as `RecordStore`."""

    def __init__(self, store: RecordStore, *, job_bytes_max: int) -> None:
        self._store = store
        self._job_bytes_max = job_bytes_max
        self._lock = threading.Lock()
        self._uses: OrderedDict[JobKey, tuple[float, int]] = OrderedDict()
        """Bytes of each job's calls: until when the figure counts, by the monotonic clock, and the
        bytes. They are counted in between; those of other routers may be missing."""

    def check(self, job: JobKey, trajectory: str, call: str) -> None:
        """Check that a call may begin. One that is kept already may; calls that are under way count
        for nothing.

        Raises:
            QuotaExceededError: the trajectory has `CALLS_MAX` calls, or the job `job_bytes_max`
                bytes of them.
        """
        keys = {each.key for each in self._store.find(_folder(job, trajectory))}
        if _key(job, trajectory, call) in keys:
            return
        if len(keys) >= CALLS_MAX:
            raise QuotaExceededError(
                f"trajectory {trajectory!r} has {len(keys)} calls, which is the most: name "
                "another one",
                used=len(keys),
                quota=CALLS_MAX,
            )
        used = self._used(job)
        if used >= self._job_bytes_max:
            raise QuotaExceededError(
                f"job {job.job!r} has {used} bytes of captured calls; the bound is "
                f"{self._job_bytes_max}: wait an hour after a trajectory's last call, or have the "
                "operator raise captures_job_bytes_max",
                used=used,
                quota=self._job_bytes_max,
            )

    def add(self, job: JobKey, trajectory: str, call: str, row: bytes) -> None:
        """Keep a call of a trajectory; it is durable when this returns."""
        self._store.write(_key(job, trajectory, call), row)
        with self._lock:
            if job in self._uses:
                until, used = self._uses[job]
                self._uses[job] = (until, used + len(row))

    def read(self, job: JobKey, trajectory: str) -> list[bytes]:
        """All calls of a trajectory, in any order; empty: there are none."""
        rows = [self._store.read(each.key) for each in self._store.find(_folder(job, trajectory))]
        return [row for row in rows if row is not None]

    def discard(self, *, older_than_s: float) -> None:
        """Delete trajectories whose last call is older."""
        limit = self._store.clock() - older_than_s
        newest: dict[str, float] = {}
        for each in self._store.find(FOLDER):
            folder = each.key.rpartition("/")[0]
            newest[folder] = max(newest.get(folder, 0.0), each.modified_s)
        for folder, modified_s in newest.items():
            if modified_s < limit:
                # It may have got a call since it was listed.
                self._store.remove(folder, before=limit)

    def _used(self, job: JobKey) -> int:
        now = time.monotonic()
        with self._lock:
            until, used = self._uses.get(job, (0.0, 0))
        if until <= now:
            used = sum(each.nbytes for each in self._store.find(job.folder(FOLDER)))
            with self._lock:
                self._uses[job] = (now + MEASURED_S, used)
                self._uses.move_to_end(job)
                while len(self._uses) > JOBS_MAX:
                    self._uses.popitem(last=False)
        return used


def _folder(job: JobKey, trajectory: str) -> str:
    return f"{job.folder(FOLDER)}/{file_name(trajectory)}"


def _key(job: JobKey, trajectory: str, call: str) -> str:
    return f"{_folder(job, trajectory)}/{file_name(call)}.json"
