"""Which models a caller may load: those below its roots, and checkpoints of its own jobs.

The service reads models with the rights of its own user. So a tenant may name a directory only if
an operator has listed a directory above it, in the routers' `model_roots` or in those of the
tenant. Operators may name any directory. Links are followed first: what counts is where a file
really lies.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plexrl.errors import InvalidRequestError, NotFoundError, UnknownJobError
from plexrl.statemanager.checkpoint.folder import is_name
from plexrl.storage.location import directory, is_url
from plexrl.wire import scheduler_methods as m

if TYPE_CHECKING:
    from plexrl.router.execution.scheduler_link import SchedulerLink
    from plexrl.router.services.authentication import Caller

INDEX = "model.safetensors.index.json"
"""File that names the files of a model's weights."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class ModelAccess:
    """Checks that a caller may load the model at a path or URL."""

    def __init__(
        self, scheduler: "SchedulerLink", checkpoints: str, roots: tuple[str, ...]
    ) -> None:
        """`checkpoints` is the directory or URL of all jobs' checkpoints, `roots` the directories
        below which all tenants may load models."""
        self._scheduler = scheduler
        self._url = checkpoints.rstrip("/") if is_url(checkpoints) else None
        self._folder = None if is_url(checkpoints) else directory(checkpoints)
        self._roots = roots

    async def check(self, path: str, caller: "Caller") -> None:
        """Check a model's path.

        Raises:
            NotFoundError: there is no such model, or the caller may not load it. The error is the
                same in both cases, so that nobody learns which files exist.
            InvalidRequestError: an operator's path cannot be resolved, or is a URL of something
                else than a checkpoint: nodes read it with the operator's credentials.
        """
        if is_url(path):
            await self._check_url(path, caller)
            return
        try:
            folder = await asyncio.to_thread(Path(path).resolve)
        except (OSError, RuntimeError, ValueError) as error:
            if caller.is_operator:
                raise InvalidRequestError(
                    f"model.path {path!r} cannot be resolved: {error}: give a directory on the "
                    "nodes"
                ) from error
            folder = None
        if caller.is_operator:
            return
        roots = await self.roots(caller)
        # Processes resolve a relative path from different directories. Nothing in a directory is
        # read before the directory itself is known to be the caller's.
        if (
            folder is not None
            and Path(path).is_absolute()
            and await self._are_readable([folder], roots, caller)
        ):
            files = await asyncio.to_thread(_real_files, folder)
            if files and await self._are_readable(files, roots, caller):
                return
        raise _no_such_model(path, caller, roots)

    async def roots(self, caller: "Caller") -> tuple[str, ...]:
        """The directories below which the caller may load models: the cluster's, then its own. An
        operator may load others too."""
        if caller.is_operator:
            return self._roots
        reply = await self._scheduler.call(m.MODEL_ROOTS, {"name": caller.tenant})
        return (*self._roots, *reply["model_roots"])

    async def _are_readable(
        self, files: list[Path], roots: tuple[str, ...], caller: "Caller"
    ) -> bool:
        """Whether each file lies below a root or in a checkpoint of a job of the caller."""
        allowed, checkpoints = await asyncio.to_thread(self._real_places, roots)
        jobs = set()
        for file in files:
            if checkpoints is not None and file.is_relative_to(checkpoints):
                jobs.add(file.relative_to(checkpoints).parts[:1])
            elif not any(map(file.is_relative_to, allowed)):
                return False
        return all([bool(job) and await self._owns(job[0], caller) for job in jobs])

    def _real_places(self, roots: tuple[str, ...]) -> tuple[list[Path], Path | None]:
        """The real paths of the roots and of the directory of checkpoints."""
        folder = None if self._folder is None else self._folder.resolve()
        return [Path(root).resolve() for root in roots], folder

    async def _check_url(self, url: str, caller: "Caller") -> None:
        below = url.removeprefix(f"{self._url}/").rstrip("/").split("/")
        if url.startswith(f"{self._url}/") and len(below) == 2 and all(map(is_name, below)):
            if await self._owns(below[0], caller):
                return
        elif caller.is_operator:
            where = "" if self._url is None else f", as {self._url}/JOB/NAME"
            raise InvalidRequestError(
                f"model.path {url!r} is not a checkpoint of this cluster: give a checkpoint's "
                f"URL{where}, or a directory on the nodes"
            )
        raise _no_such_model(url, caller, ())

    async def _owns(self, job: str, caller: "Caller") -> bool:
        try:
            await self._scheduler.call(m.GET_JOB, {"job": job, **caller.rights})
        except UnknownJobError:
            return False
        return True


def _real_files(folder: Path) -> list[Path]:
    """Where each file of the model's directory that a load may read really lies; none if there is
    no readable model."""
    try:
        if not (folder / "config.json").is_file():
            return []
        files = list(folder.iterdir())
        if (folder / INDEX).is_file():
            index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index)
            files += [folder / name for name in set(index.weight_map.values())]
        return [file.resolve() for file in files]
    except (OSError, RuntimeError, ValueError):
        return []


def _no_such_model(path: str, caller: "Caller", roots: tuple[str, ...]) -> NotFoundError:
    below = f"a directory with a model below {' or '.join(roots)}, or " if roots else ""
    return NotFoundError(
        f"there is no model {path!r} that tenant {caller.tenant!r} may load: give {below}a "
        "checkpoint of one of your jobs, or ask an operator to add the model's directory to your "
        "model_roots (plexrl tenants set)"
    )
