"""What the scheduler keeps of a tenant."""

from dataclasses import dataclass, field

from plexrl.ids import TenantId


@dataclass(slots=True, kw_only=True)
class Tenant:
    """Whoever holds one of these API keys."""

    tenant: TenantId
    is_operator: bool
    key_digest: str = ""
    """Only in snapshots from before a tenant could have several keys: its one key."""
    keys: dict[str, float] = field(default_factory=dict)
    """The digests of its valid API keys, oldest first, and when each was added; 0: not known."""
    revoked: list[str] = field(default_factory=list)
    """The digests of the keys that were revoked last."""
    weight: float = 1.0
    """Of its share of the cluster."""
    jobs_max: int | None = None
    """Jobs that hold GPUs at the same time; more wait."""
    gpus_max: int | None = None
    """GPUs held at the same time, a shared one counting for each job on it; more wait."""
    gpu_seconds_max: float | None = None
    """In all; beyond it nothing new is accepted."""
    live_jobs_max: int | None = None
    """Jobs that have not ended, beyond which new ones are refused; absent: the cluster's bound. An
    operator's are not bounded."""
    checkpoints_max: int | None = None
    """On the shared disk; absent: the routers' bound. An operator's are not bounded."""
    checkpoint_bytes_max: int | None = None
    """Likewise of their bytes."""
    priority_max: int = 0
    """The highest priority class of its jobs; an operator's jobs may have any."""
    gpu_seconds: float = 0.0
    """Used in all."""
