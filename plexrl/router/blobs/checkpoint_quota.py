"""How many checkpoints each tenant has on the shared disk, bounded, and how one is deleted."""

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
from plexrl.wire.operations import OperationKind, decode_params

RETRY_S = 0.5
DISK_SHARE = 0.5
"""Of the disk, for one tenant where no bound is configured."""

Plain = dict[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
"""Of a job's folder and of a checkpoint, as the StateManager takes them."""


@dataclass(frozen=True, slots=True)
class CheckpointUse:
    """What lies on the disk, checkpoints that are being written among it."""

    checkpoints: int = 0
    nbytes: int = 0


class CheckpointQuota:
    """Of all tenants, in one folder that has a folder for every job."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        folder: Path,
        router: str,
        *,
        checkpoints_max: int,
        bytes_max: int | None,
    ) -> None:
        """The bounds are those of tenants that have none of their own."""
        self._scheduler = scheduler
        self._folder = folder
        self._router = router
        self._checkpoints_max = checkpoints_max
        self._bytes_max = bytes_max

    async def check(self, job: str, params_json: str) -> None:
        """Refuse a `save_checkpoint` beyond the quota of the job's tenant.

        The one that has the name already does not count: it is replaced, or this is a repetition.
        Waits for as long as the scheduler is away, because the run itself outlives its restart.

        Raises:
            QuotaExceededError: the tenant has as many checkpoints, or bytes of them, as it may.
            StorageError: the disk cannot be looked at.
        """
        name = decode_params(OperationKind.SAVE_CHECKPOINT, params_json).name
        while True:
            try:
                owner = await self._scheduler.call("checkpoint_owner", {"job": job})
                break
            except UnknownJobError:
                # It ended meanwhile: the run has no answer any more.
                return
            except (UnavailableError, StorageError):
                await asyncio.sleep(RETRY_S)
        if owner["is_operator"]:
            return
        try:
            use = await asyncio.to_thread(self._use, owner["jobs"], (job, name))
            checkpoints_max, bytes_max = await asyncio.to_thread(self._bounds, owner)
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be looked at: {error}") from error
        if use.checkpoints < checkpoints_max and use.nbytes < bytes_max:
            return
        raise QuotaExceededError(
            f"tenant {owner['tenant']!r} has {use.checkpoints} checkpoints of {use.nbytes} bytes, "
            f"and {checkpoints_max} of {bytes_max} bytes are the most: delete some "
            "(`job.delete_checkpoint`), save with `keep_last`, or ask an operator for more",
            checkpoints=use.checkpoints,
            checkpoints_max=checkpoints_max,
            checkpoint_bytes=use.nbytes,
            checkpoint_bytes_max=bytes_max,
        )

    async def describe(self, tenant: Plain) -> Plain:
        """A tenant as the scheduler shows it, with what it has here and may have."""
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
        """Delete a checkpoint of a job that is the caller's.

        Raises:
            CheckpointNotFoundError: there is none of that name.
            StorageError: the file system refuses.
        """
        if not (_NAME.fullmatch(job) and _NAME.fullmatch(name)):
            # Nothing outside the job's folder is ever named.
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
        # Renamed first, so that no reader meets half of it.
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
    """Whether a folder is the checkpoint of that name, or one that is to become it."""
    return entry == name or (entry.startswith(f".{name}.") and entry.endswith(".part"))


def _size(path: Path) -> int:
    nbytes = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                nbytes += os.lstat(Path(folder) / file).st_size
            except FileNotFoundError:
                # It was deleted, or renamed, meanwhile.
                continue
    return nbytes
