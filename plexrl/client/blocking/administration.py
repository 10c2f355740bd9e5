"""What operators and admins of tenants do with a connection: tenants, keys, audit log, nodes."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from msgspec import UNSET, UnsetType

from plexrl.access import AuditLines, Keys, NewKeyView, UsedKeyView, WhoAmIView
from plexrl.client.calls.transport import Transport
from plexrl.limits import LIMITS, check_numbers
from plexrl.wire.messages.cluster_views import (
    DescribedTenants,
    DescribedTenantView,
    NewTenantView,
    NodeView,
)


class AccessControl:
    """Who may do what: for operators, and for the admin of a tenant about that tenant."""

    def __init__(self, transport: Transport) -> None:
        """Use `Cluster.access`."""
        self._transport = transport

    def whoami(self) -> WhoAmIView:
        """Tenant, user, role and scope of this connection's key."""
        found: WhoAmIView = self._transport.ask("GET", "/v1/whoami")
        return found

    def tenant(self, name: str) -> DescribedTenantView:
        """Weight, quotas and holdings of the tenant `name`."""
        found: DescribedTenantView = self._transport.ask("GET", tenant_path(name))
        return found

    def keys(self, tenant: str) -> list[UsedKeyView]:
        """The API keys of `tenant`, oldest first; never the keys themselves."""
        found: Keys = self._transport.ask("GET", f"{tenant_path(tenant)}/keys")
        return found["keys"]

    def create_key(
        self,
        tenant: str,
        *,
        role: str | None = None,
        user: str = "",
        name: str = "",
        scope: str = "all",
        valid_s: float | None = None,
    ) -> NewKeyView:
        """Create one more API key for `tenant`; the others stay valid until revoked.

        `role` is admin or member (default); for the operator's tenant operator (default) or viewer.
        `user` answers for what the key does, in the bill and the logs; `name` says what it is for,
        if it is a service's. A `scope` of read or openai narrows it to what changes nothing, or to
        the OpenAI-compatible endpoints. It expires after `valid_s` seconds; None: never.

        Returns `api_key`, which is shown only once, and its id `key`.
        """
        LIMITS["key"]["valid_s"].check("valid_s", valid_s)
        given = {"role": role, "user": user, "name": name, "valid_s": valid_s}
        body = {key: value for key, value in given.items() if value}
        if scope != "all":
            body["scope"] = scope
        made: NewKeyView = self._transport.ask("POST", f"{tenant_path(tenant)}/keys", body=body)
        return made

    def revoke_key(self, tenant: str, key: str) -> None:
        """Revoke an API key of `tenant`; `key` is the key's id."""
        self._transport.ask("DELETE", f"{tenant_path(tenant)}/keys/{quote(key, safe='')}")

    def audit(
        self,
        *,
        tenant: str | None = None,
        user: str | None = None,
        target: str | None = None,
        outcome: str | None = None,
        hours: float | None = None,
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        """The newest `limit` lines of the audit log, newest first: of `tenant`, of `user`, with
        `target` in their path, with this `outcome` (done, refused, failed, unknown), of the last
        `hours`."""
        LIMITS["plexrl audit"]["hours"].check("hours", hours)
        LIMITS["plexrl audit"]["limit"].check("limit", limit)
        given = {"tenant": tenant, "user": user, "target": target, "outcome": outcome}
        query: dict[str, Any] = {**given, "hours": hours, "limit": limit}
        query = {name: value for name, value in query.items() if value is not None}
        found: AuditLines = self._transport.ask("GET", "/v1/audit", query=query)
        return found["lines"]


class Administration:
    """The operator's calls of a `Cluster`."""

    _transport: Transport

    @property
    def access(self) -> AccessControl:
        """Keys and users, and the audit log."""
        return AccessControl(self._transport)

    def tenants(self) -> list[DescribedTenantView]:
        """All tenants with their weights, their quotas and what they hold (operator only)."""
        found: DescribedTenants = self._transport.ask("GET", "/v1/tenants")
        return found["tenants"]

    def create_tenant(self, name: str) -> str:
        """Create the tenant `name` (operator only). Returns its API key, which is shown only
        once."""
        made: NewTenantView = self._transport.ask("POST", "/v1/tenants", body={"name": name})
        return made["api_key"]

    def configure_tenant(
        self,
        name: str,
        *,
        weight: float | UnsetType = UNSET,
        jobs_max: int | UnsetType | None = UNSET,
        gpus_max: int | UnsetType | None = UNSET,
        gpu_seconds_max: float | UnsetType | None = UNSET,
        priority_max: int | UnsetType = UNSET,
        live_jobs_max: int | UnsetType | None = UNSET,
        checkpoints_max: int | UnsetType | None = UNSET,
        checkpoint_bytes_max: int | UnsetType | None = UNSET,
        slo: float | UnsetType | None = UNSET,
        model_roots: Sequence[str] | UnsetType = UNSET,
    ) -> DescribedTenantView:
        """Change the settings of the tenant `name` (operator only). Returns the changed tenant.

        `weight` is its share of contended GPUs relative to other tenants (default 1);
        `priority_max` is the highest `priority` of its jobs (default 0). Quotas: `jobs_max` jobs
        that hold GPUs and `live_jobs_max` that have not ended; `gpus_max` GPUs at a time;
        `gpu_seconds_max` GPU-seconds in total; `checkpoints_max` checkpoints of
        `checkpoint_bytes_max` bytes together. `slo` is that of its later jobs that name none.
        `model_roots` are absolute paths of directories below which it may load models, beside those
        of the cluster's `model_roots` and its own checkpoints.

        An argument that is left out changes nothing. None removes a quota; for `live_jobs_max`,
        `checkpoints_max`, `checkpoint_bytes_max` and `slo` it restores the cluster's own bound.
        """
        named = {
            "weight": weight,
            "jobs_max": jobs_max,
            "gpus_max": gpus_max,
            "gpu_seconds_max": gpu_seconds_max,
            "priority_max": priority_max,
            "live_jobs_max": live_jobs_max,
            "checkpoints_max": checkpoints_max,
            "checkpoint_bytes_max": checkpoint_bytes_max,
            "slo": slo,
            "model_roots": model_roots,
        }
        settings = {key: value for key, value in named.items() if value is not UNSET}
        check_numbers("tenant", settings)
        changed: DescribedTenantView = self._transport.ask(
            "PATCH", tenant_path(name), body=settings
        )
        return changed

    def tenant_keys(self, name: str) -> list[UsedKeyView]:
        """The API keys of the tenant `name`, oldest first (operator only): each one's id, its time
        of creation and its last use since the start of the scheduler, to about a minute; never the
        key itself."""
        return self.access.keys(name)

    def rotate_key(self, name: str) -> NewKeyView:
        """Create one more API key for the tenant `name` (operator only). Returns `api_key`, which
        is shown only once, and its id `key`. The tenant's other keys stay valid until revoked."""
        return self.access.create_key(name)

    def revoke_key(self, name: str, key: str) -> None:
        """Revoke an API key of the tenant `name` (operator only); `key` is the key's id."""
        self.access.revoke_key(name, key)

    def drain(self, node: str) -> NodeView:
        """Move all work off the node named `node` (operator only). Each deployment moves between
        two of its operations, as soon as there is capacity elsewhere. No new work is placed on the
        node."""
        path = f"/v1/nodes/{quote(node, safe='')}/drain"
        view: NodeView = self._transport.ask("POST", path)
        return view

    def undrain(self, node: str) -> NodeView:
        """Put the drained node named `node` back in use (operator only)."""
        path = f"/v1/nodes/{quote(node, safe='')}/undrain"
        view: NodeView = self._transport.ask("POST", path)
        return view

    def remove_node(self, node: str) -> None:
        """Forget the node named `node`, which has left or does not come back, and has no work
        (operator only)."""
        self._transport.ask("DELETE", f"/v1/nodes/{quote(node, safe='')}")


def tenant_path(name: str) -> str:
    """Path of the routes about a tenant."""
    return f"/v1/tenants/{quote(name, safe='')}"
