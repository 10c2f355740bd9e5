"""Routes about runs: controllers that run on the cluster."""

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from plexrl.errors import ConflictError, InvalidRequestError, NotFoundError
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.services.services import RouterServices, Services
from plexrl.runs.records import FOLDER, RunRecords, RunSpec, decode_files
from plexrl.wire.messages.cluster_views import Runs, RunView

ROUTES = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=ViewRoute)
FILE_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
FILES_MAX = 100
"""Each is an open descriptor of the service at the start of its script."""
ARGUMENTS_MAX, ARGUMENT_CHARACTERS_MAX = 1000, 25_000
"""Linux starts no program with an argument of 128 KiB."""


class RunRequest(BaseModel):
    """A script, and how it shall run."""

    model_config = ConfigDict(extra="forbid")

    script: str
    files: dict[str, str]
    """The script and other files beside it, base64 by name."""
    arguments: list[str] = []
    memory_bytes: Annotated[int, Field(ge=64 << 20, le=1 << 40)] = 2 << 30
    cpu_s: Annotated[int, Field(ge=1, le=1 << 30)] = 24 * 3600
    wall_s: Annotated[float, Field(gt=0, le=1e9)] = 24 * 3600.0
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3


class RunLog(BaseModel):
    """The end of what a script has printed."""

    text: str


def records(services: RouterServices) -> RunRecords:
    """The runs. Raises `ConflictError`: the operator has not allowed any."""
    if not services.runs_max:
        raise ConflictError(
            "this cluster runs no controllers: the operator allows it with plexrl up --runs 8"
        )
    return RunRecords(services.data_dir / FOLDER)


async def own(request: Request, services: RouterServices, run: str) -> RunView:
    """A run of the caller. Raises `NotFoundError`."""
    caller = await services.caller(request)
    view = await asyncio.to_thread(records(services).view, run)
    if caller.scope not in (None, view["tenant"]):
        raise NotFoundError(f"there is no run {run!r}: plexrl runs lists yours")
    return view


@ROUTES.post("", status_code=201, summary="Run a script on the cluster")
async def start(request: Request, services: Services, body: RunRequest) -> RunView:
    """It gets a key of its own, which is revoked at its end. For tenants only."""
    caller = await services.caller(request)
    kept = records(services)
    if caller.is_operator:
        raise InvalidRequestError(
            "a script with the operator's rights is not run: use a tenant's key (plexrl tenants "
            "add NAME)"
        )
    try:
        files = decode_files(body.files)
    except ValueError as error:
        raise InvalidRequestError(f"a file is not base64: {error}") from error
    if len(files) > FILES_MAX:
        raise InvalidRequestError(f"{len(files)} files: give {FILES_MAX} at most")
    _check_arguments(body.arguments)
    for name in files:
        if FILE_NAME.fullmatch(name) is None or name in (".", ".."):
            raise InvalidRequestError(f"file {name!r}: give a plain name without folders")
    if body.script not in files:
        raise InvalidRequestError(f"the script {body.script!r} is not among the files")
    spec = RunSpec(
        run=f"run-{secrets.token_hex(5)}",
        tenant=caller.tenant,
        user=caller.user,
        script=body.script,
        files=files,
        arguments=tuple(body.arguments),
        memory_bytes=body.memory_bytes,
        cpu_s=body.cpu_s,
        wall_s=body.wall_s,
        restarts=body.restarts,
        created_at=time.time(),
    )
    await asyncio.to_thread(kept.add, spec, live_max=services.runs_max)
    return await asyncio.to_thread(kept.view_of, spec)


@ROUTES.get("", summary="The caller's runs")
async def list_runs(request: Request, services: Services) -> Runs:
    """For the operator those of all tenants. Oldest first."""
    caller = await services.caller(request)
    return {"runs": await asyncio.to_thread(_views, records(services), caller.scope)}


@ROUTES.get("/{run}", summary="One run")
async def get(request: Request, services: Services, run: str) -> RunView:
    """State, attempts and times."""
    return await own(request, services, run)


@ROUTES.get("/{run}/log", summary="The last lines that the script has printed")
async def log(request: Request, services: Services, run: str, lines: int = 100) -> RunLog:
    """What all attempts have printed, its end."""
    await own(request, services, run)
    text = await asyncio.to_thread(records(services).log, run, max(1, min(lines, 10_000)))
    return RunLog(text=text)


@ROUTES.post("/{run}/stop", summary="Stop a run, and cancel its job")
async def stop(request: Request, services: Services, run: str) -> RunView:
    """A run that has ended stays as it is."""
    view = await own(request, services, run)
    await asyncio.to_thread(records(services).stop, run)
    return view


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raises `InvalidRequestError`: no program could be started with them."""
    if len(arguments) > ARGUMENTS_MAX or sum(map(len, arguments)) > ARGUMENT_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"the arguments are too long: give {ARGUMENTS_MAX} at most, with "
            f"{ARGUMENT_CHARACTERS_MAX} characters together, and the rest in a file"
        )
    if any("\0" in each for each in arguments):
        raise InvalidRequestError("an argument has a zero byte: leave it out")


def _views(kept: RunRecords, tenant: str | None) -> list[RunView]:
    """The runs of a tenant (None: of all), oldest first."""
    mine = [each for each in kept.summaries() if tenant in (None, each.tenant)]
    return [kept.view_of(each) for each in sorted(mine, key=lambda each: each.created_at)]
