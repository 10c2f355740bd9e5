"""Quota on each tenant's checkpoints on the shared disk, and deletion of a checkpoint."""

import asyncio
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl.errors import (
    CheckpointNotFoundError,
    QuotaExceededError,
    StorageError,
    UnavailableError,
    UnknownJobError,
)
from plexrl.router.execution.scheduler_link import SchedulerLink

RETRY_S = 0.5
DISK_SHARE = 0.5
"""Share of the disk for one tenant if no bound is configured."""

Plain = dict[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
"""Valid name of a job's folder and of a checkpoint, as in the StateManager."""


@dataclass(frozen=True, slots=True)
class CheckpointUse:
    """What a tenant has on the disk, including checkpoints that are being written."""

    checkpoints: int = 0
    nbytes: int = 0


class CheckpointQuota:
    """Quotas of all tenants over one folder that holds a folder for each job."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        folder: Path,
        router: str,
        *,
        checkpoints_max: int,
        bytes_max: int | None,
    ) -> None:
        """The bounds apply to tenants without bounds of their own."""
        self._scheduler = scheduler
        self._folder = folder
        self._router = router
        self._checkpoints_max = checkpoints_max
        self._bytes_max = bytes_max

    async def check(self, job: str, name: str) -> None:
        """Refuse to save checkpoint `name` of `job` beyond the quota of the job's tenant.

        An existing checkpoint of that name does not count: it is replaced, or the save is a
        repetition. While the scheduler is unreachable the check waits, because the run outlives a
        restart of the scheduler.

        Raises:
            QuotaExceededError: the tenant has reached its bound on checkpoints or on their bytes.
            StorageError: the disk cannot be read.
        """
        while True:
            try:
                owner = await self._scheduler.call("checkpoint_owner", {"job": job})
                break
            except UnknownJobError:
                # The job has ended, so nobody reads the run's result.
                return
            except (UnavailableError, StorageError):
                await asyncio.sleep(RETRY_S)
        if owner["is_operator"]:
            return
        try:
            use = await asyncio.to_thread(self._use, owner["jobs"], (job, name))
            checkpoints_max, bytes_max = await asyncio.to_thread(self._bounds, owner)
        except OSError as error:
            raise StorageError(
                f"{self._folder} cannot be read: {error}: check its disk and its owner"
            ) from error
        if use.checkpoints < checkpoints_max and use.nbytes < bytes_max:
            return
        raise QuotaExceededError(
            f"tenant {owner['tenant']!r} has {use.checkpoints} checkpoints of {use.nbytes} bytes; "
            f"its bounds are {checkpoints_max} checkpoints and {bytes_max} bytes: delete some "
            "(`job.delete_checkpoint`), save with `keep_last`, or ask an operator for more",
            checkpoints=use.checkpoints,
            checkpoints_max=checkpoints_max,
            checkpoint_bytes=use.nbytes,
            checkpoint_bytes_max=bytes_max,
        )

    async def describe(self, tenant: Plain) -> Plain:
        """The scheduler's view of a tenant, with its checkpoints on the disk and its bounds."""
        owner = await self._scheduler.call("checkpoint_owner", {"tenant": tenant["tenant"]})
        use = await asyncio.to_thread(self._use, owner["jobs"], None)
        checkpoints_max, bytes_max = await asyncio.to_thread(self._bounds, owner)
        return {
            **tenant,
            "checkpoints": use.checkpoints,
            "checkpoint_bytes": use.nbytes,
            "checkpoints_bound": None if owner["is_operator"] else checkpoints_max,
            "checkpoint_bytes_bound": None if owner["is_operator"] else bytes_max,
        }

    async def delete(self, job: str, name: str) -> None:
        """Delete a checkpoint of a job that the caller may change.

        Raises:
            CheckpointNotFoundError: the job has no checkpoint of that name.
            StorageError: the file system refuses.
        """
        if not (_NAME.fullmatch(job) and _NAME.fullmatch(name)):
            # A path outside the job's folder is never touched.
            raise CheckpointNotFoundError(f"job {job!r} has no checkpoint {name!r}")
        await asyncio.to_thread(self._delete, self._folder / job, name)

    def _bounds(self, owner: Plain) -> tuple[int, int]:
        checkpoints_max = owner["checkpoints_max"]
        bytes_max = owner["checkpoint_bytes_max"]
        if checkpoints_max is None:
            checkpoints_max = self._checkpoints_max
        if bytes_max is None:
            bytes_max = self._bytes_max
        if bytes_max is None:
            above = self._folder if self._folder.exists() else self._folder.parent
            disk = os.statvfs(above)
            bytes_max = int(DISK_SHARE * disk.f_frsize * disk.f_blocks)
        return checkpoints_max, bytes_max

    def _use(self, jobs: list[str], but: tuple[str, str] | None) -> CheckpointUse:
        if not self._folder.exists():
            return CheckpointUse()
        count = nbytes = 0
        for job in {entry.name for entry in self._folder.iterdir()}.intersection(jobs):
            for path in (self._folder / job).glob("*"):
                name = path.name
                if but is not None and job == but[0] and _is_of(name, but[1]):
                    continue
                nbytes += _size(path)
                count += not name.endswith((".gone", ".old"))
        return CheckpointUse(count, nbytes)

    def _delete(self, folder: Path, name: str) -> None:
        suffix = f".{self._router}.gone"
        # Renamed first, so that no reader finds half of it.
        gone = folder / f".{name}{suffix}"
        try:
            for left in folder.glob(f".*{suffix}"):
                shutil.rmtree(left)
            (folder / name).rename(gone)
            shutil.rmtree(gone)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"job {folder.name!r} has no checkpoint {name!r}"
            ) from error
        except OSError as error:
            raise StorageError(f"checkpoint {folder / name} was not deleted: {error}") from error


def _is_of(entry: str, name: str) -> bool:
    """Whether a folder is the checkpoint `name`, or a partial write of it."""
    return entry == name or (entry.startswith(f".{name}.") and entry.endswith(".part"))


def _size(path: Path) -> int:
    nbytes = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                nbytes += os.lstat(Path(folder) / file).st_size
            except FileNotFoundError:
                # It was deleted or renamed meanwhile.
                continue
    return nbytes
