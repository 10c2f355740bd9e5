"""What `plexrl up` was asked for."""

from dataclasses import dataclass
from pathlib import Path

from plexrl.errors import InvalidRequestError

GIB = 1 << 30


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
    """`pack` or `isolated`."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    journal_bytes_max: int | None = None
    """Bound of the journal; absent: the disk's."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "gpu_memory_bytes", "host_memory_bytes"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1")
        if self.policy not in ("pack", "isolated"):
            raise InvalidRequestError(f"policy {self.policy!r} is unknown: use pack or isolated")
        if not 0 <= self.port < 65536:
            raise InvalidRequestError(f"port {self.port} does not exist: use 0 to 65535")
