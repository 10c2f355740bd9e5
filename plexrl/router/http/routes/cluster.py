"""Routes about the cluster: its nodes and groups, its tenants, and what they used."""

import asyncio
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from plexrl.process.folders.operator_key import NAME, new_api_key, stage_private
from plexrl.router.http.authentication import key_digest
from plexrl.router.http.gateway import Gateway
from plexrl.router.http.schemas import TenantRequest, TenantSettings
from plexrl.router.observe.metrics import metrics_text
from plexrl.wire.parameter_checks import check_name

Plain = dict[str, Any]


def cluster_routes(gateway: Gateway) -> APIRouter:
    """Status, nodes, groups, tenants and what they used."""
    routes = APIRouter(prefix="/v1", tags=["cluster"])

    @routes.get("/health", summary="What is wrong with the cluster; needs no key")
    async def health() -> Plain:
        return await gateway.health.public()

    @routes.get("/metrics", summary="The same as figures for Prometheus; needs no key")
    async def metrics() -> Response:
        text = metrics_text(await gateway.health.public(), time.time())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @routes.get("/status", summary="The cluster in a few numbers")
    async def status(request: Request) -> Plain:
        caller = await gateway.caller(request)
        status = await gateway.scheduler.call("status", caller.claim)
        told = await gateway.health.public()
        added: Plain = {name: told[name] for name in ("conditions", "restarts", "last_restart_at")}
        if caller.is_operator:
            added["conditions"] = await gateway.health.conditions()
            added["parts"] = msgspec.to_builtins(gateway.health.parts())
        return {**status, **added}

    @routes.get("/nodes", summary="All nodes")
    async def nodes(request: Request) -> Plain:
        caller = await gateway.caller(request)
        return await gateway.scheduler.call("list_nodes", caller.claim)

    @routes.get("/groups", summary="All node groups: who holds the lock, what switching cost")
    async def groups(request: Request) -> Plain:
        caller = await gateway.operator(request)
        return await gateway.scheduler.call("list_groups", caller.claim)

    @routes.get("/tenants", summary="All tenants: weights, quotas and what they hold")
    async def tenants(request: Request) -> Plain:
        caller = await gateway.operator(request)
        found = await gateway.scheduler.call("list_tenants", caller.claim)
        return {"tenants": [await gateway.checkpoint_quota.describe(t) for t in found["tenants"]]}

    @routes.post("/tenants", status_code=201, summary="Create a tenant; its key is shown once")
    async def create_tenant(request: Request, body: TenantRequest) -> Plain:
        caller = await gateway.operator(request)
        check_name("tenant", body.name)
        key = new_api_key()
        await gateway.scheduler.call(
            "create_tenant", {**caller.claim, "name": body.name, "key_digest": key_digest(key)}
        )
        return {"tenant": body.name, "api_key": key}

    @routes.patch("/tenants/{name}", summary="Set a tenant's weight, quotas and highest priority")
    async def configure_tenant(request: Request, name: str, body: TenantSettings) -> Plain:
        caller = await gateway.operator(request)
        fields = {**caller.claim, "name": name, **body.model_dump(exclude_unset=True)}
        changed = await gateway.scheduler.call("configure_tenant", fields)
        return await gateway.checkpoint_quota.describe(changed)

    @routes.get("/tenants/{name}/keys", summary="A tenant's API keys: ids and times, not the keys")
    async def keys(request: Request, name: str) -> Plain:
        caller = await gateway.operator(request)
        return await gateway.scheduler.call("list_keys", {**caller.claim, "name": name})

    @routes.post(
        "/tenants/{name}/keys",
        status_code=201,
        summary="Give a tenant one more API key, which is shown once; the others stay valid",
    )
    async def add_key(request: Request, name: str) -> Plain:
        caller = await gateway.operator(request)
        key = new_api_key()
        fields = {**caller.claim, "name": name, "key_digest": key_digest(key)}
        file = gateway.data_dir / NAME
        if name == caller.tenant and file.exists():
            # Commands on this data directory use the key in this file. The new key is on the disk
            # before it is valid, so that a full disk refuses the rotation instead of half doing it.
            staged = await asyncio.to_thread(stage_private, file, key)
            told = await gateway.scheduler.call("add_key", fields)
            staged.rename(file)
        else:
            told = await gateway.scheduler.call("add_key", fields)
        return {"tenant": name, "key": told["key"], "api_key": key}

    @routes.delete("/tenants/{name}/keys/{key}", status_code=204, summary="Revoke an API key")
    async def revoke_key(request: Request, name: str, key: str) -> None:
        caller = await gateway.operator(request)
        fields = {**caller.claim, "name": name, "key": key}
        await gateway.scheduler.call("revoke_key", fields)

    @routes.get("/usage", summary="What was used, by job and kind; what sharing saved, by job")
    async def usage(request: Request) -> Plain:
        caller = await gateway.caller(request)
        return await gateway.scheduler.call("list_usage", caller.claim)

    @routes.post("/nodes/{node}/drain", summary="Move all work off a node; nothing new comes to it")
    async def drain(request: Request, node: str) -> Plain:
        caller = await gateway.operator(request)
        fields = {**caller.claim, "node": node, "is_draining": True}
        return await gateway.scheduler.call("drain_node", fields)

    @routes.post("/nodes/{node}/undrain", summary="Have a drained node back in use")
    async def undrain(request: Request, node: str) -> Plain:
        caller = await gateway.operator(request)
        fields = {**caller.claim, "node": node, "is_draining": False}
        return await gateway.scheduler.call("drain_node", fields)

    return routes
