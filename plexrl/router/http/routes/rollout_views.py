"""The route that lists asynchronous rollouts."""

from fastapi import APIRouter, Request

from plexrl.router.http.view_route import ViewRoute
from plexrl.router.services.services import Services
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.rollout_views import Rollouts

ROUTES = APIRouter(tags=["rollouts"], route_class=ViewRoute)


@ROUTES.get("/v1/rollouts", summary="Asynchronous rollouts of all jobs that the caller may see")
async def every(request: Request, services: Services) -> Rollouts:
    """The tenant's own rollouts; for the operator all. At most two seconds old."""
    caller = await services.caller(request)
    found = await services.rollout_views.views()
    if not caller.is_operator:
        listed = await services.scheduler.call(m.LIST_JOBS, caller.claim)
        own = {job["job"] for job in listed["jobs"]}
        found = [each for each in found if each["job"] in own]
    return {"rollouts": found}
