"""Quota on each tenant's checkpoints, and deletion and download of a checkpoint."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from threading import Lock
from typing import TypeVar

from plexrl.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    QuotaExceededError,
    StorageError,
    UnavailableError,
    UnknownJobError,
)
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.statemanager.checkpoint.folder import is_name
from plexrl.statemanager.checkpoint.places.place import CheckpointPlace, CheckpointRoot, StoredFile
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.cluster_views import CheckpointOwnerView, DescribedTenantView, TenantView

RETRY_S = 0.5
DISK_SHARE = 0.5
"""Share of the disk for one tenant if no bound is configured. An object store has no such bound."""
CHUNK_BYTES = 8 << 20
"""Bytes of a download that are read at a time."""

Result = TypeVar("Result")


class CheckpointQuota:
    """Quotas of all tenants over the checkpoints of all jobs."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        root: CheckpointRoot,
        router: str,
        *,
        checkpoints_max: int,
        bytes_max: int | None,
        threads: Executor | None = None,
    ) -> None:
        """The bounds apply to tenants without bounds of their own."""
        self._scheduler = scheduler
        self._root = root
        self._router = router
        self._threads = threads
        self._checkpoints_max = checkpoints_max
        self._bytes_max = bytes_max
        self._sharing = Lock()
        """Of the thread that shares a checkpoint; it goes on when its request is repeated."""

    async def check(self, job: str, name: str) -> None:
        """Refuse to save checkpoint `name` of `job` beyond the quota of the job's tenant.

        An existing checkpoint of that name does not count: it is replaced, or the save is a
        repetition. While the scheduler is unreachable the check waits, because the run outlives a
        restart of the scheduler.

        Raises:
            QuotaExceededError: the tenant has reached its bound on checkpoints or on their bytes.
            StorageError: the disk cannot be read.
        """
        owner: CheckpointOwnerView
        while True:
            try:
                owner = await self._scheduler.call(m.CHECKPOINT_OWNER, {"job": job})
                break
            except UnknownJobError:
                # The job has ended, so nobody reads the run's result.
                return
            except (UnavailableError, StorageError):
                await asyncio.sleep(RETRY_S)
        if owner["is_operator"]:
            return
        try:
            count, nbytes = await self._in_thread(
                lambda: self._root.use(owner["jobs"], (job, name))
            )
            checkpoints_max, bytes_max = await self._in_thread(lambda: self._bounds(owner))
        except OSError as error:
            raise StorageError(
                f"the folder of checkpoints cannot be read: {error}: check its disk and its owner"
            ) from error
        if count < checkpoints_max and (bytes_max is None or nbytes < bytes_max):
            return
        bound = "any number of" if bytes_max is None else bytes_max
        raise QuotaExceededError(
            f"tenant {owner['tenant']!r} has {count} checkpoints of {nbytes} bytes; "
            f"its bounds are {checkpoints_max} checkpoints and {bound} bytes: delete some "
            "(`job.delete_checkpoint`), save with `keep_last`, or ask an operator for more",
            checkpoints=count,
            checkpoints_max=checkpoints_max,
            checkpoint_bytes=nbytes,
            checkpoint_bytes_max=bytes_max,
        )

    async def describe(self, tenant: TenantView) -> DescribedTenantView:
        """The scheduler's view of a tenant, with its checkpoints and its bounds."""
        asked = {"tenant": tenant["tenant"]}
        owner = await self._scheduler.call(m.CHECKPOINT_OWNER, asked)
        count, nbytes = await self._in_thread(lambda: self._root.use(owner["jobs"], None))
        checkpoints_max, bytes_max = await self._in_thread(lambda: self._bounds(owner))
        return {
            **tenant,
            "checkpoints": count,
            "checkpoint_bytes": nbytes,
            "checkpoints_bound": None if owner["is_operator"] else checkpoints_max,
            "checkpoint_bytes_bound": None if owner["is_operator"] else bytes_max,
        }

    async def delete(self, job: str, name: str) -> None:
        """Delete a checkpoint of a job that the caller may change.

        Raises:
            CheckpointNotFoundError: the job has no checkpoint of that name.
            StorageError: the file system refuses.
        """
        place = self._place(job, name)

        def delete() -> None:
            try:
                place.delete(self._router)
                self._root.collect_garbage(job)
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(f"job {job!r} has no checkpoint {name!r}") from error
            except OSError as error:
                raise StorageError(f"checkpoint {place} was not deleted: {error}") from error

        await self._in_thread(delete)

    async def share(self, job: str, name: str, fork: str, new_name: str) -> None:
        """Give the job `fork` the checkpoint of `job` as its own, without a copy; a repeated call
        changes nothing. Both are jobs of the caller.

        Raises:
            CheckpointNotFoundError: the job has no such checkpoint.
            ConflictError: the fork has another checkpoint of that name.
            QuotaExceededError: the tenant has too many checkpoints.
            StorageError: the file system refuses, or has no hard links.
        """
        await self.check(fork, new_name)
        source, target = self._place(job, name), self._place(fork, new_name)

        def link() -> None:
            found = source.read_record()
            try:
                with self._sharing:
                    source.share(fork, new_name, self._router)
            except CheckpointExistsError:
                if target.read_record().stamps != found.stamps:
                    raise
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(
                    f"checkpoint {name!r} of job {job!r} was deleted meanwhile"
                ) from error
            except OSError as error:
                raise StorageError(f"{source} cannot be shared with {target}: {error}") from error

        await self._in_thread(link)

    async def files(self, job: str, name: str) -> tuple[str, list[StoredFile]]:
        """A version and the files of a complete checkpoint of a job that the caller may see.

        Raises:
            CheckpointNotFoundError: the job has no such checkpoint.
            CorruptStateError: the checkpoint is damaged.
            StoreUnavailableError: the object store does not answer.
        """
        place = self._place(job, name)

        def read() -> tuple[str, list[StoredFile]]:
            record = place.read_record()
            return f"{record.seq}-{record.stamps[0]}-{record.attempt}", place.files()

        return await self._in_thread(read)

    async def read(
        self, job: str, name: str, file: StoredFile, start: int, stop: int
    ) -> AsyncIterator[bytes]:
        """Bytes of one of `files`. Raises as `files`."""
        place = self._place(job, name)
        for first in range(start, stop, CHUNK_BYTES):
            last = min(first + CHUNK_BYTES, stop)

            def read(first: int = first, last: int = last) -> bytes:
                return place.read_range(file, first, last)

            try:
                yield await self._in_thread(read)
            except OSError as error:
                raise CheckpointNotFoundError(
                    f"checkpoint {name!r} of job {job!r} was deleted or replaced: {error}"
                ) from error

    def _place(self, job: str, name: str) -> CheckpointPlace:
        if not (is_name(job) and is_name(name)):
            # A path outside the job's folder is never touched.
            raise CheckpointNotFoundError(f"job {job!r} has no checkpoint {name!r}")
        return self._root.place(job, name)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _bounds(self, owner: CheckpointOwnerView) -> tuple[int, int | None]:
        checkpoints_max = owner["checkpoints_max"]
        bytes_max = owner["checkpoint_bytes_max"]
        if checkpoints_max is None:
            checkpoints_max = self._checkpoints_max
        if bytes_max is None:
            bytes_max = self._bytes_max
        if bytes_max is None and (capacity := self._root.capacity_bytes()) is not None:
            bytes_max = int(DISK_SHARE * capacity)
        return checkpoints_max, bytes_max
