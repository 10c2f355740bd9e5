"""Record of a tenant."""

from dataclasses import dataclass, field

from plexrl.access import AccessRole, KeyScope
from plexrl.ids import JobId, TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOwner:
    """The owner of an API key."""

    tenant: TenantId
    role: AccessRole = AccessRole.MEMBER
    user: str = ""
    """Who answers for what the key does; empty: nobody in particular."""
    scope: KeyScope = KeyScope.ALL
    expires_at: float = 0.0
    """0: never."""
    job: JobId | None = None
    """The job whose OpenAI-compatible endpoints are all that the key opens; None: it is a key of
    the tenant."""


@dataclass(slots=True, kw_only=True)
class ApiKey:
    """One API key of a tenant; the key itself is stored nowhere."""

    created_at: float = 0.0
    """0: unknown."""
    role: AccessRole = AccessRole.MEMBER
    user: str = ""
    """Who answers for what it does; empty: nobody in particular."""
    name: str = ""
    """What it is for; a key with a name is of a service, not of a person."""
    scope: KeyScope = KeyScope.ALL
    expires_at: float = 0.0
    """0: never."""

    def has_expired(self, now: float) -> bool:
        """Whether it is not valid any more."""
        return 0.0 < self.expires_at <= now


@dataclass(slots=True, kw_only=True)
class Tenant:
    """A tenant: its API keys, weight, quotas and use."""

    tenant: TenantId
    is_operator: bool
    keys: dict[str, ApiKey] = field(default_factory=dict)
    """By digest, oldest first: its API keys that were not revoked."""
    revoked: list[str] = field(default_factory=list)
    """Digests of the keys that were revoked last."""
    weight: float = 1.0
    """Weight of its share of the cluster."""
    jobs_max: int | None = None
    """Maximum number of jobs that hold GPUs at the same time; more jobs wait."""
    gpus_max: int | None = None
    """Maximum number of GPUs held at the same time; more jobs wait. A shared GPU counts for each
    job on it."""
    gpu_seconds_max: float | None = None
    """Total GPU time; beyond it no new work is accepted."""
    live_jobs_max: int | None = None
    """Maximum number of live jobs; more are refused. None: the cluster's limit. Operators have no
    limit."""
    checkpoints_max: int | None = None
    """Maximum number of checkpoints on the shared disk; None: the routers' limit. Operators have no
    limit."""
    checkpoint_bytes_max: int | None = None
    """Maximum bytes of these checkpoints; None: the routers' limit."""
    priority_max: int = 0
    """Highest priority class of its jobs; an operator's jobs may have any."""
    slo: float | None = None
    """`slo` of its jobs that name none; None: the cluster's `waiting_part_max`."""
    model_roots: tuple[str, ...] = ()
    """Directories below which it may load models, beside those that all tenants may use."""
    quoted_starts: list[float] = field(default_factory=list)
    """Errors of the quoted starts of its newest completed jobs, oldest first
    (`jobs.quoted_jobs`)."""
    quoted_ends: list[float] = field(default_factory=list)
    """Likewise of their ends."""
    quoted_shift: float = 0.0
    """By how much more than 20 % of those errors the interval of the next end leaves out."""
    gpu_seconds: float = 0.0
    """GPU time used so far."""
