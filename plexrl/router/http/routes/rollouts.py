"""Routes about what a rollout deployment has under way."""

from fastapi import APIRouter, Request

from plexrl.router.http.gateway import Gateway, Plain
from plexrl.router.http.schemas import PauseRequest


def rollout_routes(gateway: Gateway) -> APIRouter:
    """Pause and resume: orders to engines, which no scheduler has to admit."""
    routes = APIRouter(prefix="/v1/jobs", tags=["deployments"])

    @routes.post(
        "/{job}/deployments/{name}/pause",
        summary="Have a rollout's generations stop between two tokens",
        description="They go on by `resume`, or by themselves after `for_s`. What runs keeps its "
        "place; what is submitted meanwhile waits. A worker that is lost takes its pause with it.",
    )
    async def pause(request: Request, job: str, name: str, body: PauseRequest) -> Plain:
        caller = await gateway.caller(request)
        view = await gateway.deployment(caller, f"{job}/{name}")
        return {"engines": await gateway.engines.order(view, "pause", for_s=body.for_s)}

    @routes.post(
        "/{job}/deployments/{name}/resume",
        summary="Let paused generations go on; no harm where none is",
    )
    async def resume(request: Request, job: str, name: str) -> Plain:
        caller = await gateway.caller(request)
        view = await gateway.deployment(caller, f"{job}/{name}")
        return {"engines": await gateway.engines.order(view, "resume")}

    return routes
