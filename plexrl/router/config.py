"""Configuration of a router process."""

import math
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError


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
    api_docs: bool = False
    """Whether `/docs`, `/redoc` and `/openapi.json` are there, for anybody without a key."""
    parts_file: str | None = None
    """Where the supervisor records which parts it started again; absent: there is no record."""
    body_bytes_max: int = 1 << 30
    """Largest payload of an operation; it goes to disk as it arrives."""
    json_bytes_max: int = 4 << 20
    """Largest body of any other request."""
    body_timeout_s: float = 30.0
    """In which such a body is there, and silence in a payload after which it is given up."""
    header_timeout_s: float = 10.0
    """In which a request's head is there, counted from the connection's start or its first byte;
    also how long a connection without a key may be idle."""
    metrics_row_bytes_max: int = 64 << 10
    """Largest row of a job's metrics."""
    metrics_job_bytes_max: int = 64 << 20
    """Bound on all metrics of one job."""
    tenant_checkpoints_max: int = 1000
    """Checkpoints of one tenant, where it has no bound of its own."""
    tenant_checkpoint_bytes_max: int | None = None
    """Their bytes; absent: half of the disk."""
    connections_max: int | None = None
    """Bound on open connections; absent: `connections.CONNECTIONS_MAX`. Lowered to what the limit
    on descriptors allows."""
    address_connections_max: int | None = None
    """Likewise of one client address; absent: half of all."""
    arriving_bytes_max: int = 8 << 30
    """Bound on the bodies that arrive at a time; more are refused with 429."""
    tenant_arriving_bytes_max: int = 4 << 30
    """Likewise of one tenant."""

    def __post_init__(self) -> None:
        for name in (
            "json_bytes_max",
            "body_bytes_max",
            "connections_max",
            "address_connections_max",
            "metrics_row_bytes_max",
            "metrics_job_bytes_max",
            "tenant_checkpoints_max",
            "tenant_checkpoint_bytes_max",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1")
        for name in ("header_timeout_s", "body_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidRequestError(f"{name} must be a finite number of seconds above 0")
