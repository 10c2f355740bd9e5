"""Configuration of a node's StateManager."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.eviction.tenant_limit import TenantLimit
from plexrl.statemanager.protocol.ticket_key import KEY_FILE


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
    device: DeviceKind = DeviceKind.CPU
    """What workers compute on: GPUs, or on a node without any its memory."""
    device_bytes: int | None = None
    """Bound of what is lent of each device; absent: what the device has."""
    device_prefault_bytes: int = 0
    """Of a CPU node's memory, made ready at the start: first use costs several times a copy."""
    host_prefault_bytes: int = 0
    """Of the host tier made resident at start, in the background; 0 leaves that to the first moves,
    which are slow then. Small nodes and tests want none."""
    segment_bytes_max: int = 1 << 30
    """Of one file of the host tier's memory; larger versions lie in several."""
    memory_node: int | None = None
    """NUMA node whose memory the host tier prefers; absent: all of them in turn."""
    data_threads: int | None = None
    """Threads that one copy between memories is split over; absent: one a core, up to 4."""
    nvme_queue_depth: int = 8
    """Requests of 4 MiB that an NVMe drive is given at once: an array needs several, one drive
    loses nothing by them."""
    drain: bool = False
    """Copy versions to NVMe ahead of pressure. Off by default: it writes every version once, most
    of which are superseded before they would ever have to spill."""
    published_versions: int = 2
    """Published parameter versions kept of each shard: the one being pulled and the next. A delta
    over the network needs the version that its target holds, so a rollout that skips versions gains
    by more."""
    persist_on_exit: bool = True
    """Move complete versions to the NVMe tier on a clean exit, so that a restart finds them."""
    connections_max: int = 1024
    """Connections served at once, one thread each; a node has a few for every worker."""
    checkpoint_dir: str = ""
    """Checkpoints are written to `<checkpoint_dir>/<job>/<name>`, on a file system that all nodes
    share; empty: none are."""
    checkpoint_bytes_per_s: int = 0
    """Bound of a checkpoint's writing, for disks that others use too; 0: none."""
    checkpoints_waiting_max: int = 4
    """Checkpoints that may wait for the one being written; each pins a version in the tiers."""
    checkpoint_upload_url: str = ""
    """An `fsspec` URL below which uploads go, as `s3://bucket/checkpoints`; empty: there are none.
    It is the operator's, because the daemon writes there with the operator's credentials."""
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
    tenant_bytes_max: int | None = None
    """What a tenant may have stored, in both tiers; absent: as much as there is."""
    tenant_host_bytes_max: int | None = None
    """Of that, in the host tier; what is beyond goes to NVMe straight away. Absent: likewise."""
    tenant_limits: Mapping[str, TenantLimit] = field(default_factory=dict)
    """Of tenants to whom these two do not apply."""
    served_uids: tuple[int, ...] = ()
    """Users whose processes are served, besides root and the daemon's own."""
    tenant_uids: Mapping[str, int] = field(default_factory=dict)
    """Tenants that have a user of their own: their tickets are taken from it only, and from it no
    others."""
    fault_points: tuple[str, ...] = ()
    """For tests: where the daemon kills itself (`fault_points.POINTS`)."""
    serve_tcp: str = ""
    """`host:port` on which other nodes read published versions; port 0 is any free one. Empty: none
    can."""
    serve_nixl: bool = False
    """Whether other nodes may read published versions by RDMA, through NIXL; needs `serve_tcp`."""

    def __post_init__(self) -> None:
        for name in (
            *("host_bytes", "nvme_bytes", "published_versions", "connections_max"),
            *("moves_max", "moves_waiting_max"),
            *("segment_bytes_max", "nvme_queue_depth"),
        ):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1")
        if self.serve_nixl and not self.serve_tcp:
            raise InvalidRequestError("serve_nixl needs serve_tcp, over which versions are opened")
        for name in ("checkpoint_bytes_per_s", "checkpoints_waiting_max"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(f"{name} must not be negative")
        if self.device_bytes is not None and self.device_bytes < 1:
            raise InvalidRequestError("device_bytes must be at least 1, or absent")
        if self.device_prefault_bytes < 0:
            raise InvalidRequestError("device_prefault_bytes must not be negative")

    @property
    def ticket_key_path(self) -> Path:
        """Where the ticket key lies."""
        if self.ticket_key_file is not None:
            return Path(self.ticket_key_file)
        return Path(self.nvme_dir) / KEY_FILE
