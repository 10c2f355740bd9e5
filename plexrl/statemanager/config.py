"""Configuration of a node's StateManager."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.ticket_key import KEY_FILE


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
    moves_max: int = 16
    """Moves under way at once: a few more than it takes to use the memory's bandwidth up."""
    moves_waiting_max: int = 256
    """Moves that wait for their turn; one beyond them is told to come back."""
    stuck_move_s: float = 600.0
    """A move that is under way for longer makes the daemon unhealthy; nothing ends it."""
    metrics_port: int | None = None
    """`/healthz` and `/metrics` on 127.0.0.1; 0 takes a free one, absent: none."""
    ticket_key_file: str | None = None
    """File of the key that tickets are signed with, made where there is none, mode 0600; nodes that
    take each other's tickets share one. Absent: `ticket.key` in `nvme_dir`."""
    served_uids: tuple[int, ...] = ()
    """Users whose processes are served, besides root and the daemon's own."""
    tenant_uids: Mapping[str, int] = field(default_factory=dict)
    """Tenants that have a user of their own: their tickets are taken from it only, and from it no
    others."""

    def __post_init__(self) -> None:
        for name in (
            *("host_bytes", "nvme_bytes", "published_versions", "connections_max"),
            *("moves_max", "moves_waiting_max"),
        ):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1")

    @property
    def ticket_key_path(self) -> Path:
        """Where the ticket key lies."""
        if self.ticket_key_file is not None:
            return Path(self.ticket_key_file)
        return Path(self.nvme_dir) / KEY_FILE
