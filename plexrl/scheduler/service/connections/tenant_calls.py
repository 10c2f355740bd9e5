"""Router calls about tenants: authentication, limits and API keys."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from plexrl import access
from plexrl.access import AccessRole
from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
)
from plexrl.ids import TenantId
from plexrl.scheduler.accounting.tenants import key_id
from plexrl.scheduler.service.shell import Shell
from plexrl.scheduler.state.messages import calls
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.calls import Ask, Report, Scope
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages import cluster_views as cv

SETTINGS = (
    *("weight", "jobs_max", "gpus_max", "gpu_seconds_max", "priority_max"),
    *("live_jobs_max", "checkpoints_max", "checkpoint_bytes_max", "slo", "model_roots"),
)
"""The settings of a tenant that an operator can change."""

Keep = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs work in the background, at most as long as the service lives."""


class TenantCalls:
    """Calls about tenants and their API keys. An operator makes them, and for its own tenant's keys
    an admin."""

    def __init__(self, shell: Shell, keep: Keep) -> None:
        self._shell = shell
        self._core = shell.core
        self._keep = keep

    def requests(self) -> dict[str, Ask]:
        """Calls made for the operator."""
        return dict(
            (
                calls.on_request(m.CREATE_TENANT, calls.CreateTenant, self._create),
                calls.on_request(m.CONFIGURE_TENANT, calls.ConfigureTenant, self._configure),
                calls.on_request(m.LIST_TENANTS, calls.Nothing, self._list),
                calls.on_request(m.GET_TENANT, calls.ManagedTenant, self._get),
                calls.on_request(m.LIST_KEYS, calls.ManagedTenant, self._list_keys),
                calls.on_request(m.ADD_KEY, calls.AddKey, self._add_key),
                calls.on_request(m.REVOKE_KEY, calls.RevokeKey, self._revoke_key),
            )
        )

    def reports(self) -> dict[str, Report]:
        """Calls of the router itself."""
        return dict(
            (
                calls.on_query(m.AUTHENTICATE, calls.Authenticate, self._authenticate),
                calls.on_query(m.MODEL_ROOTS, calls.OneTenant, self._model_roots),
                calls.on_query(m.CHECKPOINT_OWNER, calls.CheckpointOwner, self._checkpoint_owner),
            )
        )

    async def _authenticate(self, call: calls.Authenticate) -> access.KeyOwnerView:
        now = self._now()
        owner = self._core.authenticate(call.key_digest, now)
        if owner.job is None:
            self._shell.keys_used_at[key_id(call.key_digest)] = now
        return {
            "tenant": owner.tenant,
            "is_operator": owner.role is AccessRole.OPERATOR,
            "job": owner.job,
            "role": owner.role.value,
            "user": owner.user,
            "scope": owner.scope.value,
            "valid_s": owner.expires_at - now if owner.expires_at else None,
        }

    async def _checkpoint_owner(self, call: calls.CheckpointOwner) -> cv.CheckpointOwnerView:
        """The tenant of a job's checkpoints, and its checkpoint limits."""
        name = call.tenant
        if call.job is not None:
            name = self._core.tenant_of_job(call.job)
        if name is None:
            raise InvalidRequestError("name a job or a tenant")
        view = self._tenant(name)
        return {
            "tenant": name,
            "is_operator": view["is_operator"],
            "checkpoints_max": view["checkpoints_max"],
            "checkpoint_bytes_max": view["checkpoint_bytes_max"],
            "jobs": self._core.jobs_of(name),
        }

    async def _model_roots(self, call: calls.OneTenant) -> cv.ModelRootsView:
        return {"model_roots": self._tenant(call.name)["model_roots"]}

    async def _create(self, scope: Scope, call: calls.CreateTenant) -> cv.EmptyView:
        check_operator(scope)
        if call.name in self._core.tenants():
            raise ConflictError(f"tenant {call.name!r} exists already: choose another name")
        await self._shell.request(
            ev.TenantCreated(tenant=call.name, key_digest=call.key_digest, is_admin=True)
        )
        return {}

    async def _list(self, scope: Scope, _: calls.Nothing) -> cv.Tenants:
        check_operator(scope)
        return {"tenants": self._core.list_tenants(self._now())}

    async def _configure(self, scope: Scope, call: calls.ConfigureTenant) -> cv.TenantView:
        check_operator(scope)
        given = {name: getattr(call, name) for name in SETTINGS}
        changes = {name: value for name, value in given.items() if value is not msgspec.UNSET}
        wanted = {**self._tenant(call.name), **changes}
        await self._shell.request(msgspec.convert(wanted, ev.TenantConfigured))
        return self._tenant(call.name)

    async def _get(self, scope: Scope, call: calls.ManagedTenant) -> cv.TenantView:
        check_manager(scope, call)
        return self._tenant(call.name)

    async def _list_keys(self, scope: Scope, call: calls.ManagedTenant) -> access.Keys:
        check_manager(scope, call)
        used_at = self._shell.keys_used_at
        keys = self._tenant(call.name)["keys"]
        return {"keys": [{**key, "last_used_at": used_at.get(key["key"])} for key in keys]}

    async def _add_key(self, scope: Scope, call: calls.AddKey) -> access.AddedKeyView:
        check_manager(scope, call)
        role = call.role
        if role is None:
            is_operator = self._tenant(call.name)["is_operator"]
            role = AccessRole.OPERATOR if is_operator else AccessRole.MEMBER
        await self._shell.request(
            ev.ApiKeyGranted(
                tenant=call.name,
                key_digest=call.key_digest,
                role=role,
                user=call.user,
                name=call.key_name,
                scope=call.scope,
                expires_at=self._now() + call.valid_s if call.valid_s > 0.0 else 0.0,
            )
        )
        return {"key": key_id(call.key_digest)}

    async def _revoke_key(self, scope: Scope, call: calls.RevokeKey) -> cv.EmptyView:
        """Answers once no router accepts the key any more."""
        check_manager(scope, call)
        # Shielded: if the caller disconnects, all routers must still be notified.
        await asyncio.shield(self._keep(self._revoke(call)))
        return {}

    async def _revoke(self, call: calls.RevokeKey) -> None:
        await self._shell.request(ev.ApiKeyRevoked(tenant=call.name, key=call.key))
        await self._shell.routers.forget_callers()

    def _tenant(self, name: TenantId) -> cv.TenantView:
        for view in self._core.list_tenants(self._now()):
            if view["tenant"] == name:
                return view
        raise _no_such_tenant(name)

    def _now(self) -> float:
        return self._shell.clock.now()


def check_operator(scope: Scope) -> None:
    """Refuse a tenant's call. Raises `PermissionDeniedError`."""
    if scope is not None:
        raise PermissionDeniedError("only an operator may do this")


def check_manager(scope: Scope, call: calls.ManagedTenant) -> None:
    """Refuse a call that is neither an operator's nor one of the tenant's own admin, who cannot
    learn which other tenants there are. Raises `PermissionDeniedError`, `NotFoundError`."""
    if scope is None:
        return
    if not call.by_admin:
        raise PermissionDeniedError("only an operator or an admin of the tenant may do this")
    if scope != call.name:
        raise _no_such_tenant(call.name)


def _no_such_tenant(name: TenantId) -> NotFoundError:
    return NotFoundError(f"there is no tenant {name!r}: create it first")
