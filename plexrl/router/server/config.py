"""Configuration of a router process."""

import math
from dataclasses import dataclass, fields

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers
from plexrl.storage.location import check_location
from plexrl.wire.links.credentials import TlsFiles
from plexrl.wire.links.standing_link import check_scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpsFiles:
    """Paths of PEM files. They are read again when they change."""

    certificate: str
    """The certificate, followed by intermediate ones."""
    key: str
    """Its private key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router. Several routers may share a scheduler and its stores."""

    router: str
    """Name of this router, unique among the scheduler's routers."""
    scheduler: tuple[str, ...]
    """Addresses of the scheduler and its standbys, such as `unix:/path` or `tls://HOST:PORT`."""
    host: str
    port: int
    """0 takes a free port."""
    data_dir: str
    """Directory of this router's machine. Without the next two it holds blobs, metrics and
    checkpoints, and all routers share it."""
    data_url: str = ""
    """Where all routers keep blobs and metrics: a directory, or an object store as
    `s3://bucket/prefix`; empty: `data_dir`."""
    rollout: str = ""
    """Address of the rollout service; empty: jobs have no asynchronous rollouts."""
    checkpoint_url: str = ""
    """Where StateManagers write checkpoints, likewise; empty: `data_dir`/checkpoints."""
    blob_cache_bytes_max: int = 8 << 30
    """Bound on copies of large blobs in `data_dir` if `data_url` is an object store."""
    otlp_endpoint: str | None = None
    """URL that receives finished operations as OpenTelemetry spans; absent: no spans are sent."""
    tls: TlsFiles | None = None
    """This router's certificate on links between machines; absent: all parts are on one machine."""
    https: HttpsFiles | None = None
    """Certificate of the API; absent: the API is plain HTTP."""
    api_docs: bool = False
    """Whether `/docs`, `/redoc` and `/openapi.json` are served, without a key."""
    parts_file: str | None = None
    """File in which the supervisor records restarted parts; absent: restarts are not reported."""
    body_bytes_max: int = 1 << 30
    """Largest payload of an operation, which is streamed to disk."""
    json_bytes_max: int = 4 << 20
    """Largest body of any other request."""
    body_timeout_s: float = 30.0
    """Time limit for such a body, and longest silence while a payload arrives."""
    header_timeout_s: float = 10.0
    """Time limit for a request's head, from the start of the connection or the head's first byte;
    also the idle limit of a connection without a key. A client with one is dropped if it reads
    nothing of a response for twelve times as long."""
    model_roots: tuple[str, ...] = ()
    """Directories of the nodes below which every tenant may load models; empty: none. A tenant may
    also load those below its own `model_roots` (`plexrl tenants set`) and its own checkpoints. An
    operator may load any directory."""
    metrics_row_bytes_max: int = 64 << 10
    """Largest row of a job's metrics."""
    metrics_job_bytes_max: int = 64 << 20
    """Bound on all metrics of one job."""
    samples_job_bytes_max: int = 64 << 20
    """Bound on the samples that a job's controller logs; those of the oldest steps are deleted."""
    captures_job_bytes_max: int = 8 << 30
    """Bound on the captured calls of one job, which are kept for an hour."""
    tenant_checkpoints_max: int = 1000
    """Checkpoints of a tenant without a bound of its own."""
    tenant_checkpoint_bytes_max: int | None = None
    """Bytes of these checkpoints; absent: half of the disk."""
    oidc_file: str = ""
    """File (TOML) with the identity provider whose users may log in, and their roles; empty: there
    are API keys only. Needs `plexrl[oidc]`."""
    runs_max: int = 0
    """Controllers that run on the head at the same time (`plexrl run`), in the sandbox of rewards;
    others wait. A tenant may have as many runs that have not ended. 0: the cluster runs none."""
    audit_bytes_max: int = 256 << 20
    """Bound on the log of requests that change something (`audit/` of `data_dir`), which is
    rotated."""
    connections_max: int | None = None
    """Bound on open connections; absent: `connections.CONNECTIONS_MAX`. The limit on file
    descriptors may lower it."""
    address_connections_max: int | None = None
    """Bound on open connections of one client address; absent: half of `connections_max`."""
    refused_keys_burst: int = 20
    """Requests without a valid API key that one client network may send at once; more are refused
    with 429."""
    refused_keys_per_s: float = 1.0
    """Requests without a valid API key that it may send per second after that."""
    arriving_bytes_max: int = 8 << 30
    """Bound on the bytes of request bodies that arrive at a time; more are refused with 429."""
    tenant_arriving_bytes_max: int = 4 << 30
    """The same bound for one tenant."""

    def __post_init__(self) -> None:
        check_scheduler(self.scheduler, self.tls)
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        check_numbers("router", own)
        for name in (
            "json_bytes_max",
            "body_bytes_max",
            "connections_max",
            "address_connections_max",
            "blob_cache_bytes_max",
            "metrics_row_bytes_max",
            "metrics_job_bytes_max",
            "samples_job_bytes_max",
            "captures_job_bytes_max",
            "tenant_checkpoints_max",
            "tenant_checkpoint_bytes_max",
            "audit_bytes_max",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1")
        for name in ("data_url", "checkpoint_url"):
            if location := getattr(self, name):
                check_location(name, location)
        for root in self.model_roots:
            if not root.startswith("/"):
                raise InvalidRequestError(f"model_roots: {root!r} is not an absolute path")
        for name in ("header_timeout_s", "body_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidRequestError(f"{name} must be a finite number of seconds above 0")
