"""Roles and API keys: who may do what on a cluster, and the views of these on the wire.

An API key belongs to a tenant and has one role. `plexrl.router.services.access_table` says for each
route what each role may do there.
"""

from enum import StrEnum
from typing import Any, Final, NotRequired, TypedDict
from urllib.parse import urlsplit

from plexrl.ids import JobId, TenantId

LOCAL_HOSTS: Final = ("127.0.0.1", "::1", "localhost")


class AccessRole(StrEnum):
    """The role of an API key."""

    OPERATOR = "operator"
    """Sees and changes everything."""
    VIEWER = "viewer"
    """Sees everything, as an operator does, and changes nothing."""
    ADMIN = "admin"
    """Has the jobs of its tenant, and manages the tenant's keys and members."""
    MEMBER = "member"
    """Has the jobs of its tenant."""
    JOB = "job"
    """A job's own key, for its OpenAI-compatible endpoints."""


class KeyScope(StrEnum):
    """The part of its role's rights that a key has."""

    ALL = "all"
    READ = "read"
    """What changes nothing."""
    OPENAI = "openai"
    """The OpenAI-compatible endpoints."""


OPERATORS: Final = (AccessRole.OPERATOR, AccessRole.VIEWER)
"""Roles of the operator's keys."""
TENANTS: Final = (AccessRole.ADMIN, AccessRole.MEMBER)
"""Roles of the keys of any other tenant."""


def roles_of(*, is_operator: bool) -> tuple[AccessRole, ...]:
    """The roles that a key of the operator, or of any other tenant, may have."""
    return OPERATORS if is_operator else TENANTS


class KeyView(TypedDict):
    """One API key."""

    key: str
    created_at: float | None
    """None: unknown."""
    role: str
    """One of `AccessRole`."""
    user: str
    """Who answers for what it does; empty: nobody in particular."""
    name: str
    """What it is for; empty: it is a person's."""
    scope: str
    """One of `KeyScope`."""
    expires_at: float | None
    """None: never."""


class UsedKeyView(KeyView):
    """One API key and its use."""

    last_used_at: float | None
    """Since the start of the scheduler, to about a minute; None: not used."""


class AddedKeyView(TypedDict):
    """The scheduler has taken an API key."""

    key: str
    """Its id."""


class NewKeyView(TypedDict):
    """An API key that was just made."""

    tenant: TenantId
    key: str
    """Its id."""
    api_key: str
    """The key itself, which is shown only once."""


class KeyOwnerView(TypedDict):
    """The owner of an API key."""

    tenant: TenantId
    is_operator: bool
    """Whether it may do everything."""
    job: NotRequired[JobId | None]
    """The job whose OpenAI-compatible endpoints are all that the key opens; None, and absent from
    schedulers of earlier versions: it is a key of the tenant."""
    role: NotRequired[str]
    """One of `AccessRole`; absent from schedulers of earlier versions, as are the
    next fields."""
    user: NotRequired[str]
    scope: NotRequired[str]
    """One of `KeyScope`."""
    valid_s: NotRequired[float | None]
    """Seconds after which the key is not valid any more; None: no limit."""


class WhoAmIView(TypedDict):
    """Whose an API key is, and what it may do."""

    tenant: TenantId
    user: str
    role: str
    """One of `AccessRole`."""
    scope: str
    """One of `KeyScope`."""
    key: str
    """Id of the key."""


class AuditLines(TypedDict):
    """Lines of the audit log, newest first."""

    lines: list[dict[str, Any]]
    """As `plexrl.router.observe.audit_log` says."""


class Keys(TypedDict):
    """API keys of a tenant, oldest first."""

    keys: list[UsedKeyView]


def is_confidential(url: str) -> bool:
    """Whether nobody else reads what is sent to a URL: it is of HTTPS, or of this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and host in LOCAL_HOSTS)
