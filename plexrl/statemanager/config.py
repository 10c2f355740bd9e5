"""Configuration of a node's StateManager."""

from dataclasses import dataclass

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class StateManagerConfig:
    """One daemon."""

    node: str
    listen: str
    """Unix socket path."""
    host_dir: str
    """Directory of the host tier, on a memory file system: what lies there survives the daemon's
    death, not the machine's."""
    host_bytes: int
    """Bound of the host tier."""
    nvme_dir: str
    nvme_bytes: int
    """Bound of the NVMe tier."""
    published_versions: int = 2
    """Published parameter versions kept of each shard: the one being pulled and the next."""
    persist_on_exit: bool = True
    """Move complete versions to the NVMe tier on a clean exit, so that a restart finds them."""
    connections_max: int = 1024
    """Connections served at once, one thread each; a node has a few for every worker."""

    serve_tcp: str = ""
    """`host:port` on which other nodes read published versions; port 0 is any free one. Empty: none
    can."""
    tcp_secret_path: str = ""
    """File with the secret that whoever reads over TCP must know; it is the cluster's."""

    serve_nixl: bool = False
    """Whether other nodes may read published versions by RDMA, through NIXL; needs `serve_tcp`."""

    def __post_init__(self) -> None:
        for name in ("host_bytes", "nvme_bytes", "published_versions", "connections_max"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1")
        if bool(self.serve_tcp) != bool(self.tcp_secret_path):
            raise InvalidRequestError(
                "serve_tcp and tcp_secret_path are given together or not at all"
            )
        if self.serve_nixl and not self.serve_tcp:
            raise InvalidRequestError("serve_nixl needs serve_tcp, over which versions are opened")
