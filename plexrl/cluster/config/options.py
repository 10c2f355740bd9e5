"""Options of a cluster, as given to `plexrl up`."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from plexrl.cluster.config.network import NetworkOptions
from plexrl.errors import InvalidRequestError
from plexrl.events.config import BrokerConfig
from plexrl.limits import check_numbers
from plexrl.process.children.pulse import STUCK_S, check_stuck_s
from plexrl.scheduler.rules.ordering import ORDERINGS
from plexrl.scheduler.rules.policies import POLICIES
from plexrl.secret_arguments import check_url, exposed
from plexrl.storage.location import check_location
from plexrl.wire.links.address import host_port

GIB = 1 << 30
JOURNAL_VARIABLE = "PLEXRL_JOURNAL"
"""Environment variable that names the journal."""
OTLP_CREDENTIALS = "set OTEL_EXPORTER_OTLP_HEADERS to the header with the credentials"
HTTP = ("http://", "https://")

SECRETS = frozenset({"password", "sslpassword"})
"""Parameters of a journal's URL that are secret."""


def check_argument(journal: str) -> None:
    """Refuse a journal's URL with a password, because it was a command-line argument.

    Raises:
        InvalidRequestError: the URL has a password, or cannot be parsed.
    """
    if "://" not in journal:
        return
    import sqlalchemy as sa

    # Parsed as the journal itself parses it: other URL parsers take some passwords for a path, a
    # query or an error.
    try:
        url = sa.make_url(journal)
    except sa.exc.ArgumentError as error:
        raise InvalidRequestError("the journal's URL cannot be parsed: check it") from error
    if url.password is not None or SECRETS & url.query.keys():
        raise exposed(
            "the journal's URL holds a password",
            f"set {JOURNAL_VARIABLE} to the URL instead of --journal, or keep the password in "
            "~/.pgpass",
        )


def check_gpus(gpus: int | None, virtual_gpus: int | None) -> None:
    """Refuse a node that is to have both kinds of GPUs.

    Raises:
        InvalidRequestError: both were given.
    """
    if gpus and virtual_gpus is not None:
        raise InvalidRequestError(
            "the GPUs of a node are the machine's (--gpus) or virtual (--virtual-gpus): give one "
            "of the two"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """Settings of the parts that have no option of their own, as plain values by field name."""

    scheduler: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    statemanager: Mapping[str, Any] = field(default_factory=dict)
    agent: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of a cluster. Its control plane is processes of this machine; so are its nodes, as
    far as no others join."""

    data_dir: Path
    """Persistent directory: journal, blobs, checkpoints, logs, NVMe tiers, the operator's key."""
    data_url: str | None = None
    """Where all routers keep payloads, results and metrics: a directory, or an object store as
    `s3://bucket/prefix`; absent: `data_dir`. Credentials come from the environment."""
    checkpoint_url: str | None = None
    """Where checkpoints are, likewise; absent: `data_dir`/checkpoints."""
    nodes: int = 1
    """Number of nodes on this machine, each with a StateManager and an agent. Several have virtual
    GPUs only. 0: only nodes that join."""
    gpus: int | None = None
    """Number of this machine's NVIDIA GPUs that its node serves; each takes one worker process of a
    deployment. 0: none, and virtual ones instead. Absent: all, unless `virtual_gpus` is given."""
    virtual_gpus: int | None = None
    """Number of virtual GPUs of each node, whose workers compute on the CPU. Absent: 4 on a machine
    without GPUs."""
    gpu_memory_bytes: int | None = None
    """Memory of each GPU; a model whose state is larger is refused. Absent: that of the machine's
    GPUs, and 2 GiB of a virtual one."""
    host_memory_bytes: int | None = None
    """Bound on each node's host tier. Absent: 2 GiB, and with GPUs half of the memory that the
    node's control group may use, in both cases at most `/dev/shm`."""
    nvme_bytes: int = 64 * GIB
    """Bound on each node's NVMe tier."""
    pin_workers: bool = False
    """Bind the workers of each virtual GPU to cores of their own, so that virtual GPUs do not
    compete for the CPU."""
    policy: str = "spread+backfill"
    """Placement policy: one of `plexrl.scheduler.rules.policies.POLICIES`."""
    ordering: str = "hrrs"
    """Order of the members of a group: one of `plexrl.scheduler.rules.ordering.ORDERINGS`."""
    node_types: tuple[str, ...] = ()
    """Type of each node, for deployments with a node type; a single name applies to all nodes."""
    node_speeds: tuple[float, ...] = ()
    """Training speed of each node relative to the others; one number applies to all nodes. Absent,
    or 0: by the names of its GPUs and its type."""
    blocks: tuple[str, ...] = ()
    """Location of each node, such as `row1/rack3`; a single name applies to all nodes."""
    host: str = "127.0.0.1"
    """Address on which the routers listen; `0.0.0.0` or `::` for all addresses of the machine."""
    port: int = 0
    """Port of the first router; 0 takes the port of the last start on `data_dir`, or a free one."""
    api_docs: bool = False
    """Whether the routers serve `/docs` and `/openapi.json`, without a key."""
    routers: int = 1
    """Number of routers, each serving all clients. The second takes the port after the first, or a
    free port, and so on."""
    otlp_endpoint: str | None = None
    """URL that receives every finished operation as OpenTelemetry spans, such as
    `http://127.0.0.1:4318/v1/traces`, from the first router; absent: no spans are sent."""
    pending_operations_max: int | None = None
    """Bound on pending operations of one deployment. If this or one of the next three is absent,
    the scheduler's default applies."""
    tenant_operations_max: int | None = None
    """Bound on a tenant's unfinished operations."""
    deployment_payload_bytes_max: int | None = None
    """Bound on the payload bytes of one deployment's unfinished operations."""
    tenant_payload_bytes_max: int | None = None
    """Bound on the payload bytes of a tenant's unfinished operations."""
    tenant_live_jobs_max: int = 1000
    """Bound on live jobs of a tenant without a bound of its own."""
    tenant_checkpoints_max: int | None = None
    """Bound on checkpoints of such a tenant; absent: the router's default."""
    tenant_checkpoint_bytes_max: int | None = None
    """Bound on the bytes of these checkpoints; absent: half of the disk."""
    metrics_row_bytes_max: int | None = None
    """Bound on one row of a job's metrics, in bytes."""
    metrics_job_bytes_max: int | None = None
    """Bound on all metrics of one job, in bytes."""
    connections_max: int | None = None
    """Bound on open connections of one router. If this or one of the next four is absent, the
    router's default applies."""
    address_connections_max: int | None = None
    """Bound on open connections of one client address."""
    header_timeout_s: float | None = None
    """Time limit for a request's head."""
    body_timeout_s: float | None = None
    """Time limit for a request's JSON, and longest silence in the payload of an operation."""
    json_bytes_max: int | None = None
    """Bound on a request's JSON, in bytes."""
    journal: str | None = None
    """Path of a file, or `postgresql://user@host/name`; absent: a file in `data_dir`."""
    new_journal: bool = False
    """Start with an empty journal although `data_dir` has state of former jobs, which is lost."""
    journal_bytes_max: int | None = None
    """Bound on the journal; absent: the size of the disk."""
    archive_url: str | None = None
    """Where the history is archived: an absolute path, or a prefix of an object store; absent: the
    folder `history` in `data_dir`."""
    archive_days: float | None = None
    """How long archived events are kept; 0: nothing is archived. If this or the next one is absent,
    the scheduler's default applies."""
    archive_bytes_max: int | None = None
    """Bound on the archive, in bytes; the oldest events go first."""
    lease_s: float | None = None
    """Silence of the scheduler after which a standby on the same journal takes over; absent: the
    scheduler's default."""
    network: NetworkOptions | None = None
    """How other machines reach this cluster; absent: all parts are on this machine, and links are
    Unix sockets."""
    part_stuck_s: float = STUCK_S
    """Time without a sign of life after which a part of the cluster or a worker is killed and
    replaced; 0: never. After a quarter of it the part is named as the condition `part_stuck`."""
    settings: PartSettings = field(default_factory=PartSettings)
    """Further settings of the parts, from the configuration file."""
    events: BrokerConfig | None = None
    """MQTT broker that gets the states of jobs, nodes and groups; absent: none does."""

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can reach the routers."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    def url(self, ports: Sequence[int]) -> str:
        """URLs of the routers for this machine, separated by commas."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "http" if self.network is None else "https"
        return ",".join(f"{scheme}://{host_port(host, port)}" for port in ports)

    def __post_init__(self) -> None:
        check_stuck_s("part_stuck_s", self.part_stuck_s)
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        check_numbers("plexrl up", own)
        for name, known in (("policy", POLICIES), ("ordering", ORDERINGS)):
            if getattr(self, name) not in known:
                raise InvalidRequestError(
                    f"{name} {getattr(self, name)!r} is unknown: use one of {', '.join(known)}"
                )
        for name in ("data_url", "checkpoint_url", "archive_url"):
            location = getattr(self, name)
            if location is not None:
                check_location(name, location)
        for speed in self.node_speeds:
            check_numbers("plexrl up", {"node_speed": speed})
        for name in ("node_types", "node_speeds", "blocks"):
            count = len(getattr(self, name))
            if count not in (0, 1, self.nodes):
                raise InvalidRequestError(
                    f"{name} has {count} entries for {self.nodes} nodes: give one, or one for each"
                )
        check_gpus(self.gpus, self.virtual_gpus)
        if self.gpus and self.nodes > 1:
            raise InvalidRequestError(
                f"one node serves the GPUs of a machine, and there are to be {self.nodes}: leave "
                "--nodes out, or give --virtual-gpus instead of --gpus"
            )
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(HTTP):
            raise InvalidRequestError(
                f"otlp_endpoint {self.otlp_endpoint!r} is not a URL: write it as "
                "http://127.0.0.1:4318/v1/traces"
            )
        if self.otlp_endpoint is not None:
            check_url("otlp_endpoint", self.otlp_endpoint, OTLP_CREDENTIALS)
        if self.nodes == 0 and self.network is None:
            raise InvalidRequestError(
                "nodes is 0, and no others can join: give at least 1, or let nodes join with --tls"
            )
        if self.network is None and self.settings.rollout.get("listen"):
            raise InvalidRequestError(
                "listen of [rollout] is for routers of other machines, which need certificates: "
                "add [network] (--tls), or leave listen out"
            )
        if not self.host:
            raise InvalidRequestError("host is empty: give an address of this machine")
        if self.journal == "":
            raise InvalidRequestError(
                "journal is empty: give a path or postgresql://user@host/name"
            )
        if not 0 <= self.port <= 65536 - self.routers:
            raise InvalidRequestError(f"port {self.port} does not exist: use 0 to 65535")
