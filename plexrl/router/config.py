"""Configuration of a router process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router; several may share a scheduler and a data directory."""

    router: str
    """Its name among the scheduler's routers."""
    scheduler: str
    """The scheduler's socket path."""
    host: str
    port: int
    """0 takes a free one."""
    data_dir: str
    """Where blobs, metrics and checkpoints lie, shared by all routers."""
    otlp_endpoint: str | None = None
    """Where finished operations are sent as OpenTelemetry spans; absent: nowhere."""
    body_bytes_max: int = 1 << 30
    """Largest request body."""
    arriving_bytes_max: int = 8 << 30
    """Bound on the bodies that arrive at a time; more are refused with 429."""
    tenant_arriving_bytes_max: int = 4 << 30
    """Likewise of one tenant."""
