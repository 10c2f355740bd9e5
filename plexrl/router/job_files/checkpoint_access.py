"""Who may read a checkpoint: only the tenant of the checkpoint's job."""

import asyncio
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.statemanager.checkpoint.folder import is_name
from plexrl.storage.location import directory, is_url


class CheckpointAccess:
    """Checks that a caller may read a checkpoint. Another tenant's job is reported as unknown."""

    def __init__(self, scheduler: SchedulerLink, root: str) -> None:
        """`root` is the directory or URL of all jobs' checkpoints."""
        self._scheduler = scheduler
        self._url = root.rstrip("/") if is_url(root) else None
        self._folder = None if is_url(root) else directory(root).resolve()

    async def check_job(self, job: str, claim: dict[str, Any]) -> None:
        """Check that the caller with `claim` may see the job. Raises `UnknownJobError`."""
        await self._scheduler.call("get_job", {"job": job, **claim})

    async def check_path(self, path: str, claim: dict[str, Any]) -> None:
        """Check the path of a model's directory, which may be a checkpoint's path or URL.

        Raises:
            UnknownJobError: the path is a checkpoint of a job that the caller may not see.
            InvalidRequestError: the path is malformed, or a URL of something else: nodes read it
                with the operator's credentials.
        """
        if is_url(path):
            below = path.removeprefix(f"{self._url}/").rstrip("/").split("/")
            if (
                not path.startswith(f"{self._url}/")
                or len(below) != 2
                or not all(is_name(name) for name in below)
            ):
                where = "" if self._url is None else f", as {self._url}/JOB/NAME"
                raise InvalidRequestError(
                    f"model.path {path!r} is not a checkpoint of this cluster: give a checkpoint's "
                    f"URL{where}, or a directory on the nodes"
                )
            await self.check_job(below[0], claim)
            return
        try:
            found = await asyncio.to_thread(Path(path).resolve)
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidRequestError(
                f"model.path {path!r} cannot be resolved: {error}: give a directory on the nodes"
            ) from error
        folder = self._folder
        if folder is not None and found.is_relative_to(folder) and found != folder:
            await self.check_job(found.relative_to(folder).parts[0], claim)
