"""Storage quota of one tenant on a node."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimit:
    """Quota of a tenant; an absent field means no quota."""

    total_bytes: int | None = None
    """Quota in both tiers together, replicas and copies counted once; a larger version is
    refused."""
    host_bytes: int | None = None
    """Quota in the host tier; a version beyond it goes to NVMe."""
