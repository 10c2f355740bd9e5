"""Configuration of a node's StateManager."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.protocol.network import TRUSTED
from plexrl.statemanager.protocol.ticket_key import KEY_FILE
from plexrl.storage.location import check_location
from plexrl.wire.links.credentials import TlsFiles

PREFAULT_SHARE: Final = 15 / 16
"""Part of a GPU node's host tier to make ready. The rest is for what is not in segments: headers of
versions, and files of workers, which have sizes of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimit:
    """Storage quota of one tenant on a node; an absent field means no quota."""

    total_bytes: int | None = None
    """Quota in both tiers together, replicas and copies counted once; a larger version is
    refused."""
    host_bytes: int | None = None
    """Quota in the host tier; a version beyond it goes to NVMe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateManagerConfig:
    """One daemon."""

    node: str
    listen: str
    """Unix socket path."""
    host_dir: str
    """Directory of the host tier, on a memory file system. Its files survive the daemon, but not a
    reboot of the machine."""
    host_bytes: int
    """Capacity of the host tier."""
    nvme_dir: str
    nvme_bytes: int
    """Capacity of the NVMe tier."""
    device: DeviceKind = DeviceKind.CPU
    """Device that workers compute on: GPUs, or host memory on a node without GPUs."""
    device_bytes: int | None = None
    """Memory per device that may be allocated to workers; absent: all of it. A CPU node copies a
    state to its device ahead of a switch only if this is set."""
    device_prefault_bytes: int = 0
    """Device memory of a CPU node to prefault at start: the first use of a page costs several times
    a copy."""
    device_idle_bytes: int | None = None
    """Memory per GPU to keep after an offload, for the next load of the same user; absent: half of
    the GPU's memory. All that the next load does not take is released before it starts."""
    host_prefault_bytes: int | None = None
    """Host-tier memory to allocate (and pin) in the background after the start; 0: none, and the
    first moves are slow. Absent: 15/16 of the host tier on a node with GPUs, else none."""
    segment_bytes_max: int = 1 << 30
    """Maximum size of a host-tier segment file. Files start small and double up to it."""
    memory_node: int | None = None
    """NUMA node that the host tier prefers; absent: interleave over the nodes to which the GPUs are
    attached, or over all."""
    data_threads: int | None = None
    """Threads per copy between memories; absent: one per core, at most 4."""
    nvme_queue_depth: int = 8
    """Concurrent requests of 4 MiB per NVMe drive: an array needs several, and a single drive does
    not suffer from them."""
    drain: bool = False
    """Copy versions to NVMe before the host tier is full. Off by default, because it writes every
    version once and most versions are superseded before they have to be spilled."""
    published_versions: int = 2
    """Published versions to keep per shard: the one being pulled and the next. A delta transfer
    needs the version that the reader holds, so readers that skip versions benefit from more."""
    persist_on_exit: bool = True
    """Move complete versions to the NVMe tier on a clean exit; a restart then finds them."""
    connections_max: int = 1024
    """Concurrent connections, one thread each; every worker opens a few."""
    checkpoint_url: str = ""
    """Checkpoints go to `<checkpoint_url>/<job>/<name>`: a directory that all nodes share, or an
    object store as `s3://bucket/prefix`. Empty: no checkpoints."""
    checkpoint_bytes_per_s: int = 0
    """Rate limit of checkpoint writes, for disks with other users; 0: no limit."""
    checkpoints_waiting_max: int = 4
    """Queued checkpoints behind the one being written; each pins a version in the tiers."""
    moves_max: int = 16
    """Concurrent moves: a few more than saturate the memory bandwidth."""
    moves_waiting_max: int = 256
    """Moves that may wait in the queue; further requests are refused and may be retried."""
    stuck_move_s: float = 600.0
    """A move that runs longer makes the daemon unhealthy. The move itself is not ended."""
    metrics_port: int | None = None
    """Port of `/healthz` and `/metrics` on 127.0.0.1; 0: any free port; absent: none."""
    ticket_key_file: str | None = None
    """File of the key that signs tickets, created with mode 0600 if missing; nodes that accept each
    other's tickets share the key. Absent: `ticket.key` in `nvme_dir`."""
    tenant_bytes_max: int | None = None
    """Quota of a tenant in both tiers together; absent: no quota."""
    tenant_host_bytes_max: int | None = None
    """Quota of a tenant in the host tier; versions beyond it go to NVMe. Absent: no quota."""
    tenant_limits: Mapping[str, TenantLimit] = field(default_factory=dict)
    """Quotas of single tenants, each in place of the two defaults above."""
    served_uids: tuple[int, ...] = ()
    """Users whose processes may connect, in addition to root and the daemon's own user."""
    tenant_uids: Mapping[str, int] = field(default_factory=dict)
    """User of each tenant that has its own: the tenant's tickets are accepted from this user only,
    and this user may show no other tenant's tickets."""
    fault_points: tuple[str, ...] = ()
    """For tests: points at which the daemon kills itself (`fault_points.POINTS`)."""
    serve_tcp: str = ""
    """`host:port` on which other nodes read versions, by mutual TLS unless `fabric` is trusted.
    Port 0: any free port. Empty: not served."""
    tls: TlsFiles | None = None
    """Certificate of this node, for links with other nodes' StateManagers; absent: no such links,
    unless `fabric` is trusted."""
    fabric: str = ""
    """`trusted`: the network between nodes is the cluster's own, so these links are plain TCP,
    which costs less CPU; the same on all nodes. Empty: it is not."""
    serve_nixl: bool = False
    """Whether other nodes read published versions by RDMA through NIXL, which neither encrypts nor
    authenticates: needs `serve_tcp` and a trusted `fabric`."""

    def __post_init__(self) -> None:
        if self.checkpoint_url:
            check_location("checkpoint_url", self.checkpoint_url)
        for name in (
            *("host_bytes", "nvme_bytes", "published_versions", "connections_max"),
            *("moves_max", "moves_waiting_max"),
            *("segment_bytes_max", "nvme_queue_depth"),
        ):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1")
        if self.fabric not in ("", TRUSTED):
            raise InvalidRequestError(f'fabric is "{TRUSTED}" or empty, not {self.fabric!r}')
        if self.serve_tcp and self.tls is None and self.fabric != TRUSTED:
            raise InvalidRequestError(
                "serve_tcp needs tls (ca, certificate, key), so that only nodes of this cluster "
                f'can read: set it, or fabric = "{TRUSTED}" if the network is the cluster\'s own'
            )
        if self.serve_nixl and not (self.serve_tcp and self.fabric == TRUSTED):
            raise InvalidRequestError(
                "serve_nixl needs serve_tcp, which opens the versions, and a network that is the "
                f'cluster\'s own: set serve_tcp and fabric = "{TRUSTED}"'
            )
        for name in ("checkpoint_bytes_per_s", "checkpoints_waiting_max"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(f"{name} must not be negative")
        if self.device_bytes is not None and self.device_bytes < 1:
            raise InvalidRequestError("device_bytes must be at least 1, or absent")
        if self.device_idle_bytes is not None and self.device_idle_bytes < 0:
            raise InvalidRequestError("device_idle_bytes must not be negative")
        if self.device_prefault_bytes < 0:
            raise InvalidRequestError("device_prefault_bytes must not be negative")
        if self.host_prefault_bytes is not None and self.host_prefault_bytes < 0:
            raise InvalidRequestError("host_prefault_bytes must not be negative")

    @property
    def prefault_bytes(self) -> int:
        """Host-tier memory to make ready."""
        if self.host_prefault_bytes is not None:
            return min(self.host_prefault_bytes, self.host_bytes)
        has_gpus = self.device == DeviceKind.CUDA
        return default_prefault_bytes(self.host_bytes, has_gpus=has_gpus)

    @property
    def ticket_key_path(self) -> Path:
        """Path of the ticket key."""
        if self.ticket_key_file is not None:
            return Path(self.ticket_key_file)
        return Path(self.nvme_dir) / KEY_FILE


def default_prefault_bytes(host_bytes: int, *, has_gpus: bool) -> int:
    """Bytes of host memory that a node makes ready unless its operator says otherwise. Without GPUs
    that is nothing: workers of several virtual nodes share the machine's memory, and nothing is
    pinned.

    Args:
        host_bytes: capacity of the host tier.
        has_gpus: whether the node's workers compute on GPUs.
    """
    return int(host_bytes * PREFAULT_SHARE) if has_gpus else 0
