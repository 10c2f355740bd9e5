"""Routes that show asynchronous rollouts, and the page about them."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from plexrl.router.http.dashboard.page import HEADERS, PAGE
from plexrl.router.services.services import Services

Plain = dict[str, Any]

ROUTES = APIRouter(tags=["rollouts"])


@ROUTES.get("/v1/rollouts", summary="Asynchronous rollouts of all jobs that the caller may see")
async def every(request: Request, services: Services) -> Plain:
    """The tenant's own rollouts; for the operator all. At most two seconds old."""
    caller = await services.caller(request)
    found = await services.rollout_views.views()
    if not caller.is_operator:
        jobs = (await services.scheduler.call("list_jobs", caller.claim))["jobs"]
        own = {each["job"] for each in jobs}
        found = [each for each in found if each["job"] in own]
    return {"rollouts": found}


@ROUTES.get("/dashboard", include_in_schema=False)
async def dashboard() -> HTMLResponse:
    """A page that asks for a key and shows the rollouts that it may see."""
    return HTMLResponse(PAGE, headers=HEADERS)
