"""What `plexrl up` was asked for."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plexrl.errors import InvalidRequestError

GIB = 1 << 30
JOURNAL_VARIABLE = "PLEXRL_JOURNAL"
"""Environment variable that names the journal. Every user of the machine can read the arguments of
processes; the environment of a process can be read by its own user only."""
HTTP = ("http://", "https://")

POLICIES = ("isolated", "pack", "spread", "spread+backfill", "co-execution")
"""The scheduler's own; kept here too, for a cluster's parts do not import each other."""
ORDERINGS = (
    *("hrrs", "hrrs-operations", "fifo-bursts", "fifo-operations"),
    *("shortest-first", "least-recently-served", "round-robin"),
)
"""Likewise."""

SECRETS = frozenset({"password", "sslpassword"})
"""Parameters of a journal's URL that nobody else may read."""

_COUNT = (1, 65_536)
_BYTES = (1, 1 << 50)

RANGES = {
    "nodes": _COUNT,
    "routers": _COUNT,
    "gpus_per_node": _COUNT,
    "gpu_memory_bytes": _BYTES,
    "host_memory_bytes": _BYTES,
    "nvme_bytes": (0, 1 << 50),
    "pending_operations_max": (1, 1 << 40),
    "tenant_operations_max": (1, 1 << 40),
    "deployment_payload_bytes_max": (1, 1 << 62),
    "tenant_payload_bytes_max": (1, 1 << 62),
    "journal_bytes_max": (1, 1 << 62),
    "lease_s": (0.1, 86_400),
    "connections_max": (1, 1 << 20),
    "address_connections_max": (1, 1 << 20),
    "json_bytes_max": (1, 1 << 40),
    "tenant_live_jobs_max": (1, 1_000_000_000),
    "tenant_checkpoints_max": (1, 1_000_000_000),
    "tenant_checkpoint_bytes_max": (1, 1 << 62),
    "metrics_row_bytes_max": (1, 1 << 40),
    "metrics_job_bytes_max": (1, 1 << 62),
    "header_timeout_s": (0.001, 86_400),
    "body_timeout_s": (0.001, 86_400),
}
"""Least and most of every size in `ClusterOptions`."""


def check_argument(journal: str) -> None:
    """Refuse a journal's URL that holds a password, for it was an argument.

    Raises:
        InvalidRequestError: it does.
    """
    if "://" not in journal:
        return
    import sqlalchemy as sa

    # Read as whoever opens the journal reads it: it takes passwords that other readers of URLs
    # take for a path, a query or an error.
    try:
        url = sa.make_url(journal)
    except sa.exc.ArgumentError as error:
        raise InvalidRequestError("the journal's URL cannot be read: check it") from error
    if url.password is not None or SECRETS & url.query.keys():
        raise InvalidRequestError(
            "the journal's URL holds a password, and every user of this machine can read the "
            f"arguments of processes: set {JOURNAL_VARIABLE} to the URL instead of --journal, or "
            "keep the password in ~/.pgpass; change a password that others may have read"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """An embedded cluster: every part a process of this machine."""

    data_dir: Path
    """Kept over restarts: journal, blobs, checkpoints, logs, the NVMe tiers, the operator's key."""
    nodes: int = 1
    """Virtual nodes, each with a StateManager and an agent."""
    gpus_per_node: int = 4
    """Virtual GPUs: places for worker processes."""
    gpu_memory_bytes: int = 2 * GIB
    """Per GPU; a model whose state is larger is refused."""
    host_memory_bytes: int = 2 * GIB
    """Bound of each node's host tier."""
    nvme_bytes: int = 64 * GIB
    """Bound of each node's NVMe tier."""
    pin_workers: bool = False
    """Bind each virtual GPU's workers to cores of its own, so that no GPU lends another its
    compute, as none does in a real cluster."""
    policy: str = "pack"
    """Which GPUs a deployment gets: one of `POLICIES`."""
    ordering: str = "hrrs"
    """How the members of a group take turns: one of `ORDERINGS`."""
    node_types: tuple[str, ...] = ()
    """What kind of node each is, for deployments that ask for one; one name goes for all nodes."""
    blocks: tuple[str, ...] = ()
    """Where each node stands, as `row1/rack3`; one name goes for all nodes."""
    host: str = "127.0.0.1"
    """Address that the routers listen on; `0.0.0.0` or `::` for all of the machine's."""
    port: int = 0
    """Of the first router; 0 takes the one of the last start on `data_dir`, or a free one."""
    api_docs: bool = False
    """Whether the routers describe the HTTP API at `/docs` and `/openapi.json`, without a key."""
    routers: int = 1
    """Each takes requests of all clients; the second one takes the port after the first, or a free
    one, and so on."""
    otlp_endpoint: str | None = None
    """Where the first router sends every finished operation as OpenTelemetry spans, as
    `http://127.0.0.1:4318/v1/traces`; absent: nowhere."""
    pending_operations_max: int | None = None
    """Bound on the operations that wait in one deployment's queue; absent: the scheduler's own, as
    of the next ones."""
    tenant_operations_max: int | None = None
    """Bound on a tenant's operations that are not finished."""
    deployment_payload_bytes_max: int | None = None
    """Bound on the payloads of one deployment's operations that are not finished."""
    tenant_payload_bytes_max: int | None = None
    """Likewise of a tenant."""
    tenant_live_jobs_max: int = 1000
    """Jobs of one tenant that have not ended, where it has no bound of its own."""
    tenant_checkpoints_max: int | None = None
    """Checkpoints of one tenant, likewise; absent: the router's own bound."""
    tenant_checkpoint_bytes_max: int | None = None
    """Their bytes; absent: half of the disk."""
    metrics_row_bytes_max: int | None = None
    """Bound on one row of a job's metrics."""
    metrics_job_bytes_max: int | None = None
    """Bound on all metrics of one job."""
    connections_max: int | None = None
    """Bound on the open connections of one router; absent: its own, as of the next ones."""
    address_connections_max: int | None = None
    """Likewise of one client address."""
    header_timeout_s: float | None = None
    """In which a request's head is there."""
    body_timeout_s: float | None = None
    """In which a request's JSON is there, and longest silence in the payload of an operation."""
    json_bytes_max: int | None = None
    """Bound on a request's JSON."""
    journal: str | None = None
    """Path of a file or `postgresql://user@host/name`; absent: a file in `data_dir`."""
    new_journal: bool = False
    """Begin an empty journal although `data_dir` has state of former jobs, which are given up."""
    journal_bytes_max: int | None = None
    """Bound of the journal; absent: the disk's."""
    lease_s: float | None = None
    """Silence of the scheduler after which a standby on the same journal leads; absent: its own
    default."""

    @property
    def is_exposed(self) -> bool:
        """Whether other machines may reach the routers."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    def url(self, ports: Sequence[int]) -> str:
        """Where this machine reaches the routers, with commas between."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        shown = f"[{host}]" if ":" in host else host
        return ",".join(f"http://{shown}:{port}" for port in ports)

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            # Written so that NaN, which compares as false, is refused too.
            if value is not None and not least <= value <= most:
                raise InvalidRequestError(
                    f"{name} is {value}: it must be at least {least} and at most {most}"
                )
        for name, known in (("policy", POLICIES), ("ordering", ORDERINGS)):
            if getattr(self, name) not in known:
                raise InvalidRequestError(
                    f"{name} {getattr(self, name)!r} is unknown: use one of {', '.join(known)}"
                )
        for name in ("node_types", "blocks"):
            count = len(getattr(self, name))
            if count not in (0, 1, self.nodes):
                raise InvalidRequestError(
                    f"{name} has {count} names for {self.nodes} nodes: give one, or one for each"
                )
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(HTTP):
            raise InvalidRequestError(
                f"otlp_endpoint {self.otlp_endpoint!r} is no URL: write it as "
                "http://127.0.0.1:4318/v1/traces"
            )
        if not self.host:
            raise InvalidRequestError("host is empty: give an address of this machine")
        if self.journal == "":
            raise InvalidRequestError(
                "journal is empty: give a path or postgresql://user@host/name"
            )
        if not 0 <= self.port <= 65536 - self.routers:
            raise InvalidRequestError(f"port {self.port} does not exist: use 0 to 65535")
