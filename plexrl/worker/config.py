"""Configuration of a node agent and of the worker processes it starts."""

from dataclasses import dataclass, field

from plexrl.errors import InvalidRequestError
from plexrl.wire.links.credentials import TlsFiles
from plexrl.wire.links.standing_link import check_scheduler


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
    """Folder with the rendezvous files of the ranks of a WPG; the same for all nodes."""
    data_dir: str
    """Folder for logs."""
    checkpoint_url: str = ""
    """Directory or URL of all jobs' checkpoints, as in the StateManager's configuration; empty:
    `data_dir`/checkpoints."""
    nvme_bytes: int = 0
    """Capacity of the StateManager's NVMe tier."""
    node_type: str = ""
    """The operator's name for this type of node, such as `h200`; deployments can request it."""
    block: str = ""
    """Location of the node, such as `row1/rack3`; nodes of one block are near each other."""
    threads: int = 1
    """Compute threads of a worker. More than its share of cores slows all workers."""
    cores: tuple[int, ...] = ()
    """Cores divided among the virtual GPUs; each worker is bound to its GPU's cores. Empty: workers
    are not bound."""
    tls: TlsFiles | None = None
    """This node's certificate on links between machines; None: all parts are on one machine."""
    statemanager_tcp: str = ""
    """`host:port` at which other nodes reach the StateManager; empty: not reachable."""

    def __post_init__(self) -> None:
        check_scheduler(self.scheduler, self.tls)
        if self.gpus < 1 or self.threads < 1:
            raise InvalidRequestError(
                f"gpus is {self.gpus} and threads is {self.threads}: both must be at least 1"
            )


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
    """Path of the Unix socket to listen on."""
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
    cores: tuple[int, ...] = ()
    """Cores that the worker is bound to; empty: not bound."""
    lease_file: str = ""
    """File with the end of the node's lease; the worker ends with it. Empty: there is no lease."""


def cores_of_gpu(cores: tuple[int, ...], gpu: int, gpus: int) -> tuple[int, ...]:
    """A virtual GPU's share of a node's cores. GPUs share a core if there are fewer cores."""
    first = gpu * len(cores) // gpus
    last = (gpu + 1) * len(cores) // gpus
    return cores[first : max(last, first + 1)]
