"""Roles: who may do what on a cluster.

An API key belongs to a tenant and has one role. `plexrl.router.services.access_table` says for each
route what each role may do there.
"""

from enum import StrEnum
from typing import Final


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
