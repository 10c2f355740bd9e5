"""Router calls about tenants: authentication, limits and API keys."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import msgspec

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
from plexrl.scheduler.state.messages.calls import Answer, Ask, Plain, Report, Scope

SETTINGS = (
    *("weight", "jobs_max", "gpus_max", "gpu_seconds_max", "priority_max"),
    *("live_jobs_max", "checkpoints_max", "checkpoint_bytes_max", "slo", "model_roots"),
)
"""The settings of a tenant that an operator can change."""

Keep = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs work in the background, at most as long as the service lives."""


class TenantCalls:
    """Calls about tenants and their API keys. All except `authenticate` are for operators only."""

    def __init__(self, shell: Shell, keep: Keep) -> None:
        self._shell = shell
        self._core = shell.core
        self._keep = keep

    def requests(self) -> dict[str, Ask]:
        """Calls made for the operator."""
        return {
            "create_tenant": (calls.CreateTenant, self._create),
            "configure_tenant": (calls.ConfigureTenant, self._configure),
            "list_tenants": (calls.Nothing, self._list),
            "list_keys": (calls.OneTenant, self._list_keys),
            "add_key": (calls.AddKey, self._add_key),
            "revoke_key": (calls.RevokeKey, self._revoke_key),
        }

    def reports(self) -> dict[str, Report]:
        """Calls of the router itself."""
        return {
            "authenticate": (calls.Authenticate, self._authenticate),
            "model_roots": (calls.OneTenant, self._model_roots),
            "checkpoint_owner": (calls.CheckpointOwner, self._checkpoint_owner),
        }

    async def _authenticate(self, call: calls.Authenticate) -> Plain:
        owner = self._core.authenticate(call.key_digest)
        if owner.job is None:
            self._shell.keys_used_at[key_id(call.key_digest)] = self._now()
        return asdict(owner)

    async def _checkpoint_owner(self, call: calls.CheckpointOwner) -> Plain:
        """The tenant of a job's checkpoints, and its checkpoint limits."""
        name = call.tenant
        if call.job is not None:
            name = self._core.tenant_of_job(call.job)
        if name is None:
            raise InvalidRequestError("name a job or a tenant")
        view = self._tenant(name)
        wanted = ("tenant", "is_operator", "checkpoints_max", "checkpoint_bytes_max")
        return {**{key: view[key] for key in wanted}, "jobs": self._core.jobs_of(name)}

    async def _model_roots(self, call: calls.OneTenant) -> Plain:
        return {"model_roots": self._tenant(call.name)["model_roots"]}

    async def _create(self, scope: Scope, call: calls.CreateTenant) -> Plain:
        check_operator(scope)
        if call.name in self._core.tenants():
            raise ConflictError(f"tenant {call.name!r} exists already: choose another name")
        await self._shell.request(ev.TenantCreated(tenant=call.name, key_digest=call.key_digest))
        return {}

    async def _list(self, scope: Scope, _: calls.Nothing) -> Plain:
        check_operator(scope)
        return {"tenants": self._core.list_tenants(self._now())}

    async def _configure(self, scope: Scope, call: calls.ConfigureTenant) -> Answer:
        check_operator(scope)
        view = self._tenant(call.name)
        wanted = {
            name: view[name] if getattr(call, name) is msgspec.UNSET else getattr(call, name)
            for name in SETTINGS
        }
        await self._shell.request(ev.TenantConfigured(tenant=call.name, **wanted))
        return self._tenant(call.name)

    async def _list_keys(self, scope: Scope, call: calls.OneTenant) -> Plain:
        check_operator(scope)
        used_at = self._shell.keys_used_at
        keys = self._tenant(call.name)["keys"]
        return {"keys": [{**each, "last_used_at": used_at.get(each["key"])} for each in keys]}

    async def _add_key(self, scope: Scope, call: calls.AddKey) -> Plain:
        check_operator(scope)
        await self._shell.request(ev.ApiKeyAdded(tenant=call.name, key_digest=call.key_digest))
        return {"key": key_id(call.key_digest)}

    async def _revoke_key(self, scope: Scope, call: calls.RevokeKey) -> Plain:
        """Answers once no router accepts the key any more."""
        check_operator(scope)
        # Shielded: if the caller disconnects, all routers must still be notified.
        await asyncio.shield(self._keep(self._revoke(call)))
        return {}

    async def _revoke(self, call: calls.RevokeKey) -> None:
        await self._shell.request(ev.ApiKeyRevoked(tenant=call.name, key=call.key))
        await self._shell.routers.forget_callers()

    def _tenant(self, name: TenantId) -> Answer:
        for view in self._core.list_tenants(self._now()):
            if view["tenant"] == name:
                return view
        raise NotFoundError(f"there is no tenant {name!r}: create it first")

    def _now(self) -> float:
        return self._shell.clock.now()


def check_operator(scope: Scope) -> None:
    """Refuse a tenant's call. Raises `PermissionDeniedError`."""
    if scope is not None:
        raise PermissionDeniedError("only an operator may do this")
