"""Who may read a checkpoint: only the tenant of the checkpoint's job."""

import asyncio
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.router.execution.scheduler_link import SchedulerLink


class CheckpointAccess:
    """Checks that a caller may read a checkpoint. Another tenant's job is reported as unknown."""

    def __init__(self, scheduler: SchedulerLink, folder: Path) -> None:
        """`folder` holds one folder for each job."""
        self._scheduler = scheduler
        self._folder = folder.resolve()

    async def check_job(self, job: str, claim: dict[str, Any]) -> None:
        """Check that the caller with `claim` may see the job. Raises `UnknownJobError`."""
        await self._scheduler.call("get_job", {"job": job, **claim})

    async def check_path(self, path: str, claim: dict[str, Any]) -> None:
        """Check the path of a model's directory, which may be a checkpoint's.

        Raises:
            UnknownJobError: the path is a checkpoint of a job that the caller may not see.
            InvalidRequestError: the path is malformed.
        """
        try:
            found = await asyncio.to_thread(Path(path).resolve)
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidRequestError(
                f"model.path {path!r} cannot be resolved: {error}: give a directory on the nodes"
            ) from error
        if found.is_relative_to(self._folder) and found != self._folder:
            await self.check_job(found.relative_to(self._folder).parts[0], claim)
