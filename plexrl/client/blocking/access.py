"""Keys and users of a cluster, and the log of what they did."""

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from plexrl.access import AuditLines, Keys, NewKeyView, UsedKeyView, WhoAmIView
from plexrl.limits import LIMITS
from plexrl.wire.messages.cluster_views import DescribedTenantView

if TYPE_CHECKING:
    from plexrl.client.calls.transport import Transport


class AccessControl:
    """Who may do what: for operators, and for the admin of a tenant about that tenant."""

    def __init__(self, transport: "Transport") -> None:
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
        LIMITS["audit"]["hours"].check("hours", hours)
        LIMITS["audit"]["limit"].check("limit", limit)
        given = {"tenant": tenant, "user": user, "target": target, "outcome": outcome}
        query: dict[str, Any] = {**given, "hours": hours, "limit": limit}
        query = {name: value for name, value in query.items() if value is not None}
        found: AuditLines = self._transport.ask("GET", "/v1/audit", query=query)
        return found["lines"]


def tenant_path(name: str) -> str:
    """Path of the routes about a tenant."""
    return f"/v1/tenants/{quote(name, safe='')}"
