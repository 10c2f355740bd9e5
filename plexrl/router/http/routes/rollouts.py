"""Routes that pause and resume the generations of a rollout deployment.

The router sends these requests straight to the engines; the scheduler does not admit them.
"""

from fastapi import APIRouter, Request

from plexrl.router.http.schemas import PauseRequest
from plexrl.router.http.services import Plain, Services

ROUTES = APIRouter(prefix="/v1/jobs", tags=["deployments"])


@ROUTES.post(
    "/{job}/deployments/{name}/pause",
    summary="Pause a rollout's generations between two tokens",
)
async def pause(
    request: Request, services: Services, job: str, name: str, body: PauseRequest
) -> Plain:
    """The generations continue on `resume`, or by themselves after `for_s`.

    Running samples keep their slots; new generations wait. A worker that is lost loses its pause.
    """
    caller = await services.caller(request)
    view = await services.deployment(caller, f"{job}/{name}")
    return {"engines": await services.engines.command(view, "pause", for_s=body.for_s)}


@ROUTES.post(
    "/{job}/deployments/{name}/resume",
    summary="Resume paused generations",
)
async def resume(request: Request, services: Services, job: str, name: str) -> Plain:
    """Does nothing if the generations are not paused."""
    caller = await services.caller(request)
    view = await services.deployment(caller, f"{job}/{name}")
    return {"engines": await services.engines.command(view, "resume")}
