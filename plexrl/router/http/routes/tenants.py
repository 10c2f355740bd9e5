"""Routes about tenants, their keys, and what was done with these."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from plexrl.access import AccessRole, AuditLines, Keys, KeyScope, NewKeyView, WhoAmIView
from plexrl.ids import TenantId
from plexrl.process.folders.durable_files import rename_durably
from plexrl.process.folders.operator_key import NAME, new_api_key, stage_private
from plexrl.router.http.schemas import Directory, Limited, Strict
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.observe.audit_log import read_audit
from plexrl.router.services.authentication import key_digest
from plexrl.router.services.services import RouterServices, Services
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.cluster_views import DescribedTenants, DescribedTenantView, NewTenantView
from plexrl.wire.parameter_checks import check_name

ROUTES = APIRouter(prefix="/v1", tags=["tenants"], route_class=ViewRoute)
USER = r"^[!-~]{0,200}$"
"""Names of users: those of identity providers, such as addresses, without spaces."""


class TenantRequest(Strict):
    """A tenant to create."""

    name: str = Field(description="letters, digits, '.', '_' and '-'")


class KeyRequest(Strict):
    """An API key to create."""

    role: Annotated[
        AccessRole | None,
        Field(
            description="`operator` or `viewer` for the operator's tenant, `admin` or `member` for "
            "another one; absent: `operator`, or `member`",
        ),
    ] = None
    user: Annotated[str, Field(pattern=USER, description="who answers for what the key does")] = ""
    name: Annotated[
        str, Field(pattern=USER, description="what it is for, if it is not a person's")
    ] = ""
    scope: Annotated[KeyScope, Field(description="the part of its role's rights that it has")] = (
        KeyScope.ALL
    )
    valid_s: Annotated[float | None, Limited("key", "valid_s")] = None


class TenantSettings(Strict):
    """Changes to a tenant's weight, quotas and highest priority. An absent field stays as it is;
    null removes a quota."""

    weight: Annotated[float, Limited("tenant", "weight")] = Field(
        1.0,
        description="share of the cluster relative to the other tenants' weights",
    )
    jobs_max: Annotated[int | None, Limited("tenant", "jobs_max")] = Field(
        None, description="jobs that hold GPUs at the same time"
    )
    gpus_max: Annotated[int | None, Limited("tenant", "gpus_max")] = Field(
        None, description="GPUs held at the same time"
    )
    gpu_seconds_max: Annotated[float | None, Limited("tenant", "gpu_seconds_max")] = Field(
        None, description="GPU-seconds in total; after that new work is refused"
    )
    live_jobs_max: Annotated[int | None, Limited("tenant", "live_jobs_max")] = Field(
        None, description="jobs that have not ended; null: the cluster's bound"
    )
    checkpoints_max: Annotated[int | None, Limited("tenant", "checkpoints_max")] = Field(
        None, description="checkpoints on the shared disk; null: the cluster's bound"
    )
    checkpoint_bytes_max: Annotated[int | None, Limited("tenant", "checkpoint_bytes_max")] = Field(
        None, description="bytes of them; null: the cluster's bound"
    )
    priority_max: Annotated[int, Limited("tenant", "priority_max")] = Field(
        0, description="highest priority of the tenant's jobs"
    )
    slo: Annotated[float | None, Limited("tenant", "slo")] = Field(
        None, description="`slo` of jobs that name none; null: the cluster's `waiting_part_max`"
    )
    model_roots: list[Directory] = Field(
        [],
        max_length=64,
        description="directories below which the tenant may load models, beside the cluster's",
    )


PLAIN_KEY = KeyRequest()


@ROUTES.get("/whoami", summary="Whose the key is, and what it may do")
async def whoami(request: Request, services: Services) -> WhoAmIView:
    """Tenant, user, role and scope of the key of this request."""
    caller = await services.caller(request)
    return {
        "tenant": TenantId(caller.tenant),
        "user": caller.user,
        "role": caller.role.value,
        "scope": caller.key_scope.value,
        "key": caller.key,
    }


@ROUTES.get("/tenants", summary="All tenants: weights, quotas and what they hold")
async def tenants(request: Request, services: Services) -> DescribedTenants:
    """For operators and viewers."""
    found = await services.ask(request, m.LIST_TENANTS)
    return {"tenants": [await services.checkpoint_quota.describe(t) for t in found["tenants"]]}


@ROUTES.post("/tenants", status_code=201, summary="Create a tenant; its key is shown once")
async def create_tenant(request: Request, services: Services, body: TenantRequest) -> NewTenantView:
    """For operators. The key is one of an admin of the tenant."""
    check_name("tenant", body.name)
    key = new_api_key()
    await services.ask(request, m.CREATE_TENANT, name=body.name, key_digest=key_digest(key))
    return {"tenant": TenantId(body.name), "api_key": key}


@ROUTES.get("/tenants/{name}", summary="One tenant: weight, quotas and what it holds")
async def tenant(request: Request, services: Services, name: str) -> DescribedTenantView:
    """For operators, viewers, and admins of the tenant."""
    found = await services.manage(request, m.GET_TENANT, name=name)
    return await services.checkpoint_quota.describe(found)


@ROUTES.patch("/tenants/{name}", summary="Set a tenant's weight, quotas and highest priority")
async def configure_tenant(
    request: Request, services: Services, name: str, body: TenantSettings
) -> DescribedTenantView:
    """For operators. Returns the tenant after the change."""
    settings = body.model_dump(exclude_unset=True)
    changed = await services.ask(request, m.CONFIGURE_TENANT, name=name, **settings)
    return await services.checkpoint_quota.describe(changed)


@ROUTES.get("/tenants/{name}/keys", summary="A tenant's API keys: ids and times, not the keys")
async def keys(request: Request, services: Services, name: str) -> Keys:
    """For operators, viewers, and admins of the tenant."""
    return await services.manage(request, m.LIST_KEYS, name=name)


@ROUTES.post(
    "/tenants/{name}/keys",
    status_code=201,
    summary="Create one more API key for a tenant; the key is shown once",
)
async def add_key(
    request: Request, services: Services, name: str, body: KeyRequest = PLAIN_KEY
) -> NewKeyView:
    """For operators and admins of the tenant. The tenant's other keys stay valid."""
    caller = await services.caller(request)
    key = new_api_key()
    fields = {
        "name": name,
        "key_digest": key_digest(key),
        "role": body.role,
        "user": body.user,
        "key_name": body.name,
        "scope": body.scope,
        "valid_s": body.valid_s or 0.0,
    }
    file = services.data_dir / NAME
    if caller.is_operator and name == caller.tenant and body == PLAIN_KEY and file.exists():
        # Commands on this data directory use the key in this file. The new key is on the disk
        # before it is valid, so that a full disk refuses the rotation instead of half doing it.
        staged = await asyncio.to_thread(stage_private, file, key)
        reply = await services.manage(request, m.ADD_KEY, **fields)
        await asyncio.to_thread(rename_durably, staged, file)
    else:
        reply = await services.manage(request, m.ADD_KEY, **fields)
    return {"tenant": TenantId(name), "key": reply["key"], "api_key": key}


@ROUTES.delete("/tenants/{name}/keys/{key}", status_code=204, summary="Revoke an API key")
async def revoke_key(request: Request, services: Services, name: str, key: str) -> None:
    """For operators and admins of the tenant. `key` is the key's id."""
    await services.manage(request, m.REVOKE_KEY, name=name, key=key)


@ROUTES.get("/audit", summary="Who changed what, and who was refused")
async def audit(
    request: Request,
    services: Services,
    tenant: str | None = None,
    user: str | None = None,
    target: str | None = None,
    outcome: Literal["done", "refused", "failed", "unknown"] | None = None,
    hours: Annotated[float | None, Limited("plexrl audit", "hours", in_query=True)] = None,
    limit: Annotated[int, Limited("plexrl audit", "limit", in_query=True)] = 100,
) -> AuditLines:
    """The newest `limit` lines, newest first, of the routers that share this one's data directory:
    of the requests of a tenant, of a user, or with `target` in their paths. An admin sees those of
    its tenant; operators and viewers all."""
    caller = await services.caller(request)
    wanted = {"tenant": tenant, "user": user, "outcome": outcome}
    since = "" if hours is None else _iso(time.time() - 3600.0 * hours)

    def keep(line: dict[str, Any]) -> bool:
        return (
            caller.scope in (None, line.get("tenant"))
            and all(value in (None, line.get(name)) for name, value in wanted.items())
            and (target is None or target in str(line.get("path")))
            and str(line.get("at")) >= since
        )

    return {"lines": await _read(services, keep, limit)}


async def _read(services: RouterServices, keep: Any, limit: int) -> list[dict[str, Any]]:
    # One at a time, because each may read all of the log.
    async with services.audit_reads:
        return await asyncio.to_thread(read_audit, services.data_dir, keep, limit)


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
