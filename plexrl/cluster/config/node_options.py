"""Options of a node that joins a cluster, as given to `plexrl node join`."""

import re
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path

from plexrl.cluster.config.network import NODE_PORTS, check_fabric, check_host, check_ports
from plexrl.cluster.config.options import GIB, PartSettings, check_gpus
from plexrl.limits import check_numbers
from plexrl.process.children.pulse import STUCK_S, check_stuck_s

NODE_DIR = Path("~/.plexrl-node")
"""Default data directory of a node. Not that of a cluster, since both may be on one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of one node."""

    data_dir: Path
    """Persistent directory: certificate, logs, NVMe tier."""
    name: str = ""
    """The node's name in the cluster; empty: the machine's host name."""
    gpus: int | None = None
    """Number of the machine's NVIDIA GPUs that the node serves; each takes one worker process of a
    deployment. 0: none, and virtual ones instead. Absent: all, unless `virtual_gpus` is given."""
    virtual_gpus: int | None = None
    """Number of virtual GPUs, whose workers compute on the CPU; to be given on a machine without
    GPUs."""
    gpu_memory_bytes: int | None = None
    """Memory of each GPU; absent: that of the machine's GPUs, or 2 GiB without GPUs."""
    host_memory_bytes: int | None = None
    """Bound on the host tier, in `/dev/shm`; absent: on a machine with GPUs half of the memory that
    the node's control group may use, at most `/dev/shm`; without GPUs, and with a part of one
    (MIG), 2 GiB, at most `/dev/shm`."""
    nvme_bytes: int = 64 * GIB
    """Bound on the NVMe tier, in `data_dir`."""
    node_type: str = ""
    """The operator's name for this type of node, such as `h200`; deployments can request it."""
    node_speed: float = 0.0
    """Its training speed relative to other nodes, such as 0.3; 0: by the names of its GPUs and its
    type. Training goes to the fastest nodes first."""
    block: str = ""
    """Location of the node, such as `row1/rack3`; nodes of one block are near each other."""
    host: str = ""
    """Address at which other machines reach this node; empty: the address from which this machine
    reaches the head."""
    ports: tuple[int, int] = NODE_PORTS
    """First and last port of workers, rendezvous and StateManager. Firewalls must let other nodes
    and the head through; the range lies below that of outgoing connections."""
    fabric: str = ""
    """`trusted` if nobody else can read or change the traffic between the machines: ranks of one
    group may then span machines, because collectives (gloo, NCCL) are not encrypted."""
    pin_workers: bool = False
    """Bind the workers of each virtual GPU to cores of their own."""
    part_stuck_s: float = STUCK_S
    """Time without a sign of life after which the StateManager, the agent or a worker is killed and
    replaced; 0: never."""
    settings: PartSettings = field(default_factory=PartSettings)
    """Further settings of the StateManager and the agent, from the configuration file."""

    def __post_init__(self) -> None:
        check_stuck_s("part_stuck_s", self.part_stuck_s)
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        check_numbers("plexrl node join", own)
        check_gpus(self.gpus, self.virtual_gpus)
        if self.host:
            check_host("host", self.host)
        check_ports("ports", self.ports)
        check_fabric(self.fabric)


def host_name() -> str:
    """The machine's name, as a name for a node."""
    name = socket.gethostname().partition(".")[0]
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-._")[:63] or "node"
