"""Configuration of a node agent and of the worker processes it starts."""

from dataclasses import dataclass, field

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers
from plexrl.process.children.pulse import STUCK_S, check_stuck_s
from plexrl.statemanager.protocol.network import TRUSTED
from plexrl.wire.links.credentials import TlsFiles
from plexrl.wire.links.standing_link import check_scheduler

PORT_MAX = 65_535
PORTS_PER_GPU = 8
"""Least number of ports for each GPU of a node that other machines reach: several WPGs share a GPU
in turn, each with a worker of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Configuration of one node's agent."""

    node: str
    scheduler: tuple[str, ...]
    """Addresses of the scheduler and its standbys, such as `unix:/path` or `tls://HOST:PORT`."""
    statemanager: str
    """Path of the Unix socket of the node's StateManager."""
    ticket_key_file: str
    """File with the StateManager's key, which signs the tickets of this node's workers."""
    gpus: int
    gpu_memory_bytes: int
    """Memory per GPU."""
    host_memory_bytes: int
    """Capacity of the StateManager's host tier."""
    run_dir: str
    """Folder for this node's sockets only; a short path."""
    rendezvous_dir: str
    """Folder with the rendezvous files of the ranks of a WPG; the same for all nodes of the
    scheduler's machine, and of this node only if it has a `host`."""
    data_dir: str
    """Folder for logs."""
    checkpoint_url: str = ""
    """Directory or URL of all jobs' checkpoints, as in the StateManager's configuration; empty:
    `data_dir`/checkpoints."""
    nvme_bytes: int = 0
    """Capacity of the StateManager's NVMe tier."""
    node_type: str = ""
    """The operator's name for this type of node, such as `h200`; deployments can request it."""
    node_speed: float = 0.0
    """Its training speed relative to other nodes, such as 0.3; 0: by the names of its GPUs and its
    type. Training goes to the fastest nodes first."""
    block: str = ""
    """Location of the node, such as `row1/rack3`; nodes of one block are near each other."""
    threads: int = 1
    """Compute threads of a worker. More than its share of cores slows all workers."""
    cores: tuple[int, ...] = ()
    """Cores divided among the virtual GPUs; each worker is bound to its GPU's cores. Empty: workers
    are not bound."""
    gpu_uuids: tuple[str, ...] = ()
    """UUID of each GPU, by its index on the node; empty: workers compute on the CPU."""
    gpu_kind: str = ""
    """Name of the GPUs, as the driver prints it; empty: they are virtual."""
    host: str = ""
    """Address of this machine at which other machines reach this node; empty: only processes of
    this machine do."""
    ports: tuple[int, int] = (0, 0)
    """First and last port for other machines: the first three quarters for workers, the others for
    ranks that meet. Collectives use further ports, which the system chooses."""
    tls: TlsFiles | None = None
    """This node's certificate; needed with a `host`, or a scheduler at `tls://`."""
    fabric: str = ""
    """`trusted`: the network between trusted nodes carries collectives unencrypted, so WPGs may
    span them. Empty: WPGs do not span this node and others."""
    statemanager_address: str = ""
    """Address at which other nodes reach the StateManager: `tls://NODE@HOST:PORT`, or
    `tcp://HOST:PORT` on a trusted network; empty: not reachable."""
    part_stuck_s: float = STUCK_S
    """Time without a sign of life after which a worker is killed and replaced; 0: never."""

    def __post_init__(self) -> None:
        check_stuck_s("part_stuck_s", self.part_stuck_s)
        check_scheduler(self.scheduler, self.tls)
        check_numbers("plexrl node join", {"node_speed": self.node_speed})
        if self.gpus < 1 or self.threads < 1:
            raise InvalidRequestError(
                f"gpus is {self.gpus} and threads is {self.threads}: both must be at least 1"
            )
        if self.gpu_uuids and len(set(self.gpu_uuids)) != self.gpus:
            raise InvalidRequestError(
                f"gpus is {self.gpus} and gpu_uuids names {len(set(self.gpu_uuids))}: name each "
                "GPU once, or none"
            )
        if self.fabric not in ("", TRUSTED):
            raise InvalidRequestError(f"fabric is {self.fabric!r}: set it to {TRUSTED!r}, or empty")
        if not self.host:
            return
        first, last = self.ports
        if not 1 <= first <= last <= PORT_MAX or last - first + 1 < PORTS_PER_GPU * self.gpus:
            raise InvalidRequestError(
                f"ports are {first} to {last}: a node with a host and {self.gpus} GPUs needs at "
                f"least {PORTS_PER_GPU * self.gpus} ports between 1 and {PORT_MAX}"
            )
        if self.tls is None:
            raise InvalidRequestError(
                f"host is {self.host!r}, and there is no certificate: set `tls` (ca, certificate, "
                "key)"
            )

    @property
    def worker_ports(self) -> range:
        """The ports for workers."""
        first, last = self.ports
        return range(first, last + 1 - (last + 1 - first) // 4)

    @property
    def meeting_ports(self) -> tuple[int, int]:
        """First and last port at which ranks meet; (0, 0): there are none."""
        return (self.worker_ports.stop, self.ports[1]) if self.host else (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of one worker process."""

    deployment: str
    job: str
    kind: str
    incarnation: int
    rank: int
    world_size: int
    group: str
    address: str
    """Address to listen on: `unix:/path` or `tls://NODE@HOST:PORT`."""
    rendezvous: str
    """Rendezvous file of the ranks of this incarnation."""
    statemanager: str
    ticket: bytes = field(repr=False)
    """Identifies this worker to the StateManager."""
    checkpoint_url: str
    """Directory or URL of all jobs' checkpoints."""
    spec_json: str
    log_path: str
    threads: int
    gpu: int = 0
    """Index of the worker's GPU on the node."""
    gpu_uuid: str = ""
    """UUID of that GPU; empty: the worker computes on the CPU."""
    cores: tuple[int, ...] = ()
    """Cores that the worker is bound to; empty: not bound."""
    lease_file: str = ""
    """File with the end of the node's lease; the worker ends with it. Empty: there is no lease."""
    meeting_point: str = ""
    """`host:port` on the node of rank 0 at which ranks of several machines meet; empty: at the file
    `rendezvous`."""
    interface: str = "lo"
    """Network interface of the ranks' collectives."""
    tls: TlsFiles | None = None
    """The node's certificate; absent for a Unix socket."""
    statemanager_address: str = ""
    """Address at which other nodes reach the StateManager; empty: they do not."""
    fabric: str = ""
    """As the agent's: `trusted`, or empty."""


def cores_of_gpu(cores: tuple[int, ...], gpu: int, gpus: int) -> tuple[int, ...]:
    """A virtual GPU's share of a node's cores. GPUs share a core if there are fewer cores."""
    first = gpu * len(cores) // gpus
    last = (gpu + 1) * len(cores) // gpus
    return cores[first : max(last, first + 1)]
