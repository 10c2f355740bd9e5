"""Whose a checkpoint is: its job's tenant's, by whatever name it is asked for."""

import asyncio
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.router.execution.scheduler_link import SchedulerLink


class CheckpointOwners:
    """Checks that a caller may read a checkpoint; another tenant's job is answered like one that
    does not exist."""

    def __init__(self, scheduler: SchedulerLink, folder: Path) -> None:
        """`folder` has one for every job."""
        self._scheduler = scheduler
        self._folder = folder.resolve()

    async def check_job(self, job: str, claim: dict[str, Any]) -> None:
        """`claim` is the caller's. Raises `UnknownJobError`."""
        await self._scheduler.call("get_job", {"job": job, **claim})

    async def check_path(self, path: str, claim: dict[str, Any]) -> None:
        """Of a model's directory, which may be a checkpoint's.

        Raises:
            UnknownJobError: it is one of a job that the caller has not.
            InvalidRequestError: there can be no such path.
        """
        try:
            found = await asyncio.to_thread(Path(path).resolve)
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidRequestError(f"model.path {path!r} leads nowhere: {error}") from error
        if found.is_relative_to(self._folder) and found != self._folder:
            await self.check_job(found.relative_to(self._folder).parts[0], claim)
