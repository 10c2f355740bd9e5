"""What one tenant may have stored on a node."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimit:
    """What a tenant may have stored; absent: as much as there is."""

    total_bytes: int | None = None
    """In both tiers, replicas and copies counted once; more is refused."""
    host_bytes: int | None = None
    """In the host tier; more goes to NVMe straight away."""
