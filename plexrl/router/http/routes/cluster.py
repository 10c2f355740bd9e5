"""Routes about the cluster: its health, nodes and groups, and what is used of it."""

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from plexrl.errors import PlexRLError
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.observe.health import SCHEDULER_TIMEOUT_S
from plexrl.router.observe.metrics import (
    HealthCollector,
    OverviewCollector,
    RefusedKeysCollector,
    RunHealthCollector,
    ServiceLevelCollector,
    WaitCollector,
    metrics_text,
)
from plexrl.router.services.access_table import READ, Reach
from plexrl.router.services.services import Services
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.cluster_views import (
    ForgottenNode,
    Groups,
    HealthView,
    Nodes,
    NodeView,
    StatusView,
    UsageReport,
)
from plexrl.wire.messages.rollout_views import Rollouts

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

ROUTES = APIRouter(prefix="/v1", tags=["cluster"], route_class=ViewRoute)


@ROUTES.get("/health", summary="Health of the cluster; needs no key")
async def health(services: Services) -> HealthView:
    """Codes and times of the conditions that delay work."""
    return await services.health.public()


@ROUTES.get("/metrics", summary="Prometheus metrics; a key shows more")
async def metrics(request: Request, services: Services) -> Response:
    """The content of `/v1/health`, use of the GPUs, lengths of the queues, operations by kind, the
    journal, errors of estimated waits, numbers of jobs that wait more than they accept, and figures
    of all asynchronous rollouts. With a key, also the waiting of each job
    of the tenant; of all jobs, for the operator."""
    caller = await services.caller(request) if "authorization" in request.headers else None
    if caller is not None and READ.of(caller.role, caller.key_scope) is Reach.NONE:
        caller = None
    health = HealthCollector(await services.health.public(), time.time())
    found: list[Collector] = []
    with suppress(PlexRLError):
        # Without a scheduler, `health` says so.
        call = services.scheduler.call
        quality = await call(m.ETA_QUALITY, {}, timeout_s=SCHEDULER_TIMEOUT_S)
        found.append(WaitCollector(quality))
        found.append(OverviewCollector(await services.overviews.of_all()))
        levels = await services.overviews.service_levels()
        seen = [job for job in levels["jobs"] if caller and caller.scope in (None, job["tenant"])]
        found.append(ServiceLevelCollector(levels["jobs"], seen))
        runs = services.run_watch.own_views()
        found.append(RunHealthCollector(runs, levels["jobs"], seen))
    keys = services.keys.refused
    refused = RefusedKeysCollector(keys.count, keys.limited_count)
    text = metrics_text(health, refused, *found, await services.rollout_views.metrics())
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@ROUTES.get("/status", summary="The cluster in a few numbers")
async def status(request: Request, services: Services) -> StatusView:
    """Counts of nodes, GPUs, jobs and operations, and the cluster's health."""
    caller = await services.caller(request)
    totals = await services.scheduler.call(m.STATUS, caller.claim)
    public = await services.health.public()
    view: StatusView = {
        **totals,
        "conditions": public["conditions"],
        "restarts": public["restarts"],
        "last_restart_at": public["last_restart_at"],
    }
    if caller.sees_all:
        view["conditions"] = await services.health.conditions()
        view["parts"] = msgspec.to_builtins(services.health.parts())
    return view


@ROUTES.get("/rollouts", summary="Asynchronous rollouts of all jobs that the caller may see")
async def every_rollout(request: Request, services: Services) -> Rollouts:
    """The tenant's own rollouts; for operators all. At most two seconds old."""
    caller = await services.caller(request)
    found = await services.rollout_views.views()
    if not caller.sees_all:
        listed = await services.scheduler.call(m.LIST_JOBS, caller.claim)
        own = {job["job"] for job in listed["jobs"]}
        found = [each for each in found if each["job"] in own]
    return {"rollouts": found}


@ROUTES.get("/nodes", summary="All nodes")
async def nodes(request: Request, services: Services) -> Nodes:
    """The state of each node."""
    return await services.ask(request, m.LIST_NODES)


@ROUTES.get("/groups", summary="All node groups: lock holders and cost of context switches")
async def groups(request: Request, services: Services) -> Groups:
    """For operators and viewers."""
    return await services.ask(request, m.LIST_GROUPS)


@ROUTES.get("/usage", summary="Usage by job and kind of operation; savings by sharing, by job")
async def usage(request: Request, services: Services) -> UsageReport:
    """The tenant's own usage; for the operator that of all tenants."""
    return await services.ask(request, m.LIST_USAGE)


@ROUTES.post("/nodes/{node}/drain", summary="Move all work off a node and place no new work on it")
async def drain(request: Request, services: Services, node: str) -> NodeView:
    """For operators only."""
    return await services.ask(request, m.DRAIN_NODE, node=node, is_draining=True)


@ROUTES.post("/nodes/{node}/undrain", summary="Put a drained node back in use")
async def undrain(request: Request, services: Services, node: str) -> NodeView:
    """For operators only."""
    return await services.ask(request, m.DRAIN_NODE, node=node, is_draining=False)


@ROUTES.delete("/nodes/{node}", summary="Forget a node that has left and has no work")
async def remove_node(request: Request, services: Services, node: str) -> ForgottenNode:
    """For operators only."""
    return await services.ask(request, m.REMOVE_NODE, node=node)
