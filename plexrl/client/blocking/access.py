"""What gives others access: keys of users and services, and the OpenAI-compatible endpoint of a
rollout."""

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from plexrl.access import AuditLines, Keys, NewKeyView, UsedKeyView, WhoAmIView
from plexrl.client.data.results import CapturedSegment, decode_segments
from plexrl.limits import LIMITS
from plexrl.wire.messages.cluster_views import DescribedTenantView
from plexrl.wire.parameter_checks import check_name

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIAccess:
    """Address and key for a client of OpenAI's API: `OpenAI(base_url=…, api_key=…)`."""

    base_url: str
    """URL below which the endpoints are; ends in `/v1`."""
    api_key: str = field(repr=False)
    """Opens this job's endpoints only, until the job ends or has another controller."""
    model: str
    """Name of the model in requests."""

    def for_trajectory(self, name: str) -> "OpenAIAccess":
        """The same endpoint, whose calls are captured as the trajectory `name`.

        Raises:
            InvalidRequestError: `name` cannot be a file name.
        """
        check_name("trajectory", name)
        root = re.sub(r"(/trajectories/[^/]+)?/v1$", "", self.base_url)
        return replace(self, base_url=f"{root}/trajectories/{quote(name)}/v1")


def open_access(transport: "Transport", deployment: str) -> OpenAIAccess:
    """The endpoint of `<job>/<name>` with a new key of the job, at the router in use."""
    job, _, name = deployment.rpartition("/")
    made = transport.ask("POST", f"/v1/jobs/{quote(job)}/keys")
    base = f"{transport.url}/v1/jobs/{quote(job)}/deployments/{quote(name)}/openai/v1"
    return OpenAIAccess(base_url=base, api_key=made["api_key"], model=name)


def read_captured(
    transport: "Transport", deployment: str, trajectory: str
) -> list[CapturedSegment]:
    """The segments of a captured trajectory."""
    check_name("trajectory", trajectory)
    job, _, name = deployment.rpartition("/")
    path = f"/v1/jobs/{quote(job)}/deployments/{quote(name)}/openai/trajectories"
    return decode_segments(transport.ask("GET", f"{path}/{quote(trajectory)}/captured"))
