"""Routes about the cluster: its nodes and groups, its tenants, and their usage."""

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from plexrl.errors import PlexRLError
from plexrl.ids import TenantId
from plexrl.process.folders.durable_files import rename_durably
from plexrl.process.folders.operator_key import NAME, new_api_key, stage_private
from plexrl.router.http.schemas import TenantRequest, TenantSettings
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
from plexrl.router.services.authentication import key_digest
from plexrl.router.services.services import Services
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.cluster_views import (
    DescribedTenants,
    DescribedTenantView,
    ForgottenNode,
    Groups,
    HealthView,
    Keys,
    NewKeyView,
    NewTenantView,
    Nodes,
    NodeView,
    StatusView,
    UsageReport,
)
from plexrl.wire.parameter_checks import check_name

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
    if caller.is_operator:
        view["conditions"] = await services.health.conditions()
        view["parts"] = msgspec.to_builtins(services.health.parts())
    return view


@ROUTES.get("/nodes", summary="All nodes")
async def nodes(request: Request, services: Services) -> Nodes:
    """The state of each node."""
    return await services.ask(request, m.LIST_NODES)


@ROUTES.get("/groups", summary="All node groups: lock holders and cost of context switches")
async def groups(request: Request, services: Services) -> Groups:
    """For operators only."""
    return await services.ask_as_operator(request, m.LIST_GROUPS)


@ROUTES.get("/tenants", summary="All tenants: weights, quotas and what they hold")
async def tenants(request: Request, services: Services) -> DescribedTenants:
    """For operators only."""
    found = await services.ask_as_operator(request, m.LIST_TENANTS)
    return {"tenants": [await services.checkpoint_quota.describe(t) for t in found["tenants"]]}


@ROUTES.post("/tenants", status_code=201, summary="Create a tenant; its key is shown once")
async def create_tenant(request: Request, services: Services, body: TenantRequest) -> NewTenantView:
    """For operators only."""
    caller = await services.operator(request)
    check_name("tenant", body.name)
    key = new_api_key()
    await services.scheduler.call(
        m.CREATE_TENANT, {**caller.claim, "name": body.name, "key_digest": key_digest(key)}
    )
    return {"tenant": TenantId(body.name), "api_key": key}


@ROUTES.patch("/tenants/{name}", summary="Set a tenant's weight, quotas and highest priority")
async def configure_tenant(
    request: Request, services: Services, name: str, body: TenantSettings
) -> DescribedTenantView:
    """For operators only. Returns the tenant after the change."""
    settings = body.model_dump(exclude_unset=True)
    changed = await services.ask_as_operator(request, m.CONFIGURE_TENANT, name=name, **settings)
    return await services.checkpoint_quota.describe(changed)


@ROUTES.get("/tenants/{name}/keys", summary="A tenant's API keys: ids and times, not the keys")
async def keys(request: Request, services: Services, name: str) -> Keys:
    """For operators only."""
    return await services.ask_as_operator(request, m.LIST_KEYS, name=name)


@ROUTES.post(
    "/tenants/{name}/keys",
    status_code=201,
    summary="Create one more API key for a tenant; the key is shown once",
)
async def add_key(request: Request, services: Services, name: str) -> NewKeyView:
    """For operators only. The tenant's other keys stay valid."""
    caller = await services.operator(request)
    key = new_api_key()
    fields = {**caller.claim, "name": name, "key_digest": key_digest(key)}
    file = services.data_dir / NAME
    if name == caller.tenant and file.exists():
        # Commands on this data directory use the key in this file. The new key is on the disk
        # before it is valid, so that a full disk refuses the rotation instead of half doing it.
        staged = await asyncio.to_thread(stage_private, file, key)
        reply = await services.scheduler.call(m.ADD_KEY, fields)
        await asyncio.to_thread(rename_durably, staged, file)
    else:
        reply = await services.scheduler.call(m.ADD_KEY, fields)
    return {"tenant": TenantId(name), "key": reply["key"], "api_key": key}


@ROUTES.delete("/tenants/{name}/keys/{key}", status_code=204, summary="Revoke an API key")
async def revoke_key(request: Request, services: Services, name: str, key: str) -> None:
    """For operators only. `key` is the key's id."""
    await services.ask_as_operator(request, m.REVOKE_KEY, name=name, key=key)


@ROUTES.get("/usage", summary="Usage by job and kind of operation; savings by sharing, by job")
async def usage(request: Request, services: Services) -> UsageReport:
    """The tenant's own usage; for the operator that of all tenants."""
    return await services.ask(request, m.LIST_USAGE)


@ROUTES.post("/nodes/{node}/drain", summary="Move all work off a node and place no new work on it")
async def drain(request: Request, services: Services, node: str) -> NodeView:
    """For operators only."""
    return await services.ask_as_operator(request, m.DRAIN_NODE, node=node, is_draining=True)


@ROUTES.post("/nodes/{node}/undrain", summary="Put a drained node back in use")
async def undrain(request: Request, services: Services, node: str) -> NodeView:
    """For operators only."""
    return await services.ask_as_operator(request, m.DRAIN_NODE, node=node, is_draining=False)


@ROUTES.delete("/nodes/{node}", summary="Forget a node that has left and has no work")
async def remove_node(request: Request, services: Services, node: str) -> ForgottenNode:
    """For operators only."""
    return await services.ask_as_operator(request, m.REMOVE_NODE, node=node)
