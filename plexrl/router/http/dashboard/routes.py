"""Routes of the operator's page: its files, and what it shows of the whole cluster.

An operator sees all, a tenant its own jobs. The page reads these routes with the key that was typed
into it; its files need none.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from plexrl.errors import NotFoundError
from plexrl.router.http.dashboard.page import FILES, HEADERS
from plexrl.router.http.routes.streams import SERVER_SENT, STREAM_HEADERS
from plexrl.router.http.schemas import Limited
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.services.services import Services
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.overview_views import (
    ClusterOverview,
    JobTimesView,
    LanesView,
    QueueView,
    SharesView,
)

if TYPE_CHECKING:
    from plexrl.router.http.dashboard.stream import OverviewStreams

ROUTES = APIRouter(tags=["cluster"], route_class=ViewRoute)
Count = Annotated[int, Limited("page", "start", in_query=True)]


@ROUTES.get("/dashboard", include_in_schema=False)
async def dashboard() -> Response:
    """The page, which asks for a key."""
    return _file("index.html")


@ROUTES.get("/dashboard/", include_in_schema=False)
async def dashboard_folder() -> Response:
    """To the page; its addresses are relative, so that it works behind a prefix."""
    return RedirectResponse("../dashboard")


@ROUTES.get("/dashboard/{path:path}", include_in_schema=False)
async def dashboard_file(path: str) -> Response:
    """A file of the page."""
    return _file(path)


@ROUTES.get("/v1/overview", summary="GPUs by state, what waits, and the cluster's health")
async def overview(request: Request, services: Services) -> ClusterOverview:
    """At most two seconds old. A tenant sees its own groups and jobs; GPUs that others use are
    `others`."""
    return await services.overviews.overview(await services.caller(request))


@ROUTES.get(
    "/v1/overview/stream",
    summary="The overview as server-sent events",
    response_class=StreamingResponse,
)
async def stream(request: Request, services: Services) -> StreamingResponse:
    """An event `overview` every two seconds; while there is none, an event `error` with its `code`
    and `message`. The stream ends when the key is revoked."""
    caller = await services.caller(request)
    streams: OverviewStreams = request.app.state.overview_streams
    return StreamingResponse(
        streams.open(request, services, caller),
        media_type=SERVER_SENT,
        headers=STREAM_HEADERS,
    )


@ROUTES.get("/v1/lanes", summary="Who had the GPUs of each group, over a window of time")
async def lanes(
    request: Request,
    services: Services,
    seconds: Annotated[float, Limited("page", "seconds", in_query=True)] = 3600.0,
    until_s: Annotated[float, Limited("page", "until_s", in_query=True)] = 0.0,
    first: Count = 0,
) -> LanesView:
    """A window of `seconds` that ends `until_s` seconds ago, as far back as the history of
    operations goes. 64 groups from index `first`; with more groups `bands` has all of them. A
    tenant sees groups in which it has members, and there its own jobs."""
    fields = {"seconds": seconds, "until_s": until_s, "first": first}
    return await services.ask(request, m.READ_LANES, **fields)


@ROUTES.get("/v1/queue", summary="What waits, in its order, and why")
async def queue(
    request: Request,
    services: Services,
    which: Literal["gpus", "turns", "impossible"] = "gpus",
    first: Count = 0,
    limit: Annotated[int, Limited("queue", "limit", in_query=True)] = 50,
) -> QueueView:
    """Deployments that wait for GPUs (`gpus`), for their turn on shared GPUs (`turns`), or for GPUs
    that the nodes in service cannot give (`impossible`); at most 100 from index `first`."""
    return await services.ask(request, m.READ_QUEUE, which=which, first=first, limit=limit)


@ROUTES.get("/v1/shares", summary="Tenants: share beside weight, quotas, and what they paid")
async def shares(request: Request, services: Services) -> SharesView:
    """At most 15 seconds old. A tenant sees itself."""
    return await services.overviews.shares(await services.caller(request))


@ROUTES.get("/v1/jobs/{job}/times", summary="Where the time of a job's operations went")
async def times(request: Request, services: Services, job: str) -> JobTimesView:
    """Sums over its operations in the history, by deployment and kind."""
    return await services.ask(request, m.JOB_TIMES, job=job)


def _file(path: str) -> Response:
    found = FILES.get(path)
    if found is None:
        raise NotFoundError(f"the page has no file {path!r}")
    content, media_type = found
    return Response(content, media_type=media_type, headers=HEADERS)
