"""Configuration of a node agent and of the worker processes it starts."""

from dataclasses import dataclass, field

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """One node's agent."""

    node: str
    scheduler: str
    """The scheduler's socket path."""
    statemanager: str
    """The node's StateManager's socket path."""
    ticket_key_file: str
    """The StateManager's key, for the tickets of this node's workers."""
    gpus: int
    gpu_memory_bytes: int
    """Per GPU."""
    host_memory_bytes: int
    """Bound of the StateManager's host tier."""
    run_dir: str
    """For this node's sockets: a short path, nobody else's."""
    rendezvous_dir: str
    """Where the ranks of a WPG find each other; the same for all nodes."""
    data_dir: str
    """For logs and checkpoints."""
    nvme_bytes: int = 0
    """Bound of the StateManager's NVMe tier."""
    node_type: str = ""
    """What the operator calls such nodes, as `h200`; deployments can ask for it."""
    block: str = ""
    """Where the node stands, as `row1/rack3`; nodes of one block are near each other."""
    threads: int = 1
    """Compute threads of a worker; more than its share of cores slows everybody."""
    cores: tuple[int, ...] = ()
    """Cores dealt out to the virtual GPUs, each worker bound to its GPU's; none: unbound."""
    statemanager_tcp: str = ""
    """`host:port` at which other nodes reach the StateManager; empty: none do."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.threads < 1:
            raise InvalidRequestError("a node needs at least one GPU and one thread a worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process."""

    deployment: str
    job: str
    kind: str
    incarnation: int
    rank: int
    world_size: int
    group: str
    address: str
    """Unix socket path to listen on."""
    rendezvous: str
    """File over which the ranks of this incarnation find each other."""
    statemanager: str
    ticket: bytes = field(repr=False)
    """What the StateManager knows this worker by."""
    checkpoint_dir: str
    spec_json: str
    log_path: str
    threads: int
    gpu: int = 0
    """The node's GPU that it has."""
    cores: tuple[int, ...] = ()
    """Bound to these; none: unbound."""


def cores_of_gpu(cores: tuple[int, ...], gpu: int, gpus: int) -> tuple[int, ...]:
    """A virtual GPU's share of a node's cores: neighbours share one where there are too few."""
    first = gpu * len(cores) // gpus
    last = (gpu + 1) * len(cores) // gpus
    return cores[first : max(last, first + 1)]
