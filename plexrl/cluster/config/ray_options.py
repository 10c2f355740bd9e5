"""Options of `plexrl up --ray`, in addition to those of every cluster."""

import math
from dataclasses import dataclass
from typing import Any

from plexrl.errors import InvalidRequestError

REBUILD_PAYLOAD_BYTES_MAX = 1 << 62
"""No bound: only `rebuild_operations` bounds the stored operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of a cluster on the nodes of a Ray cluster."""

    address: str
    """Address of Ray's head: `host:port`, or `auto` for the cluster that this machine is part of.
    """
    places_per_node: int | None = None
    """Workers on each node with at least as many CPUs, one CPU for each; absent: the GPUs that Ray
    counts."""
    node_dir: str = "~/.plexrl-ray"
    """Folder on each machine for the certificate, logs and NVMe tier of its Ray nodes, if they are
    on several machines (`--tls`); each node has a folder of its name in it."""
    node_grace_s: float = 5.0
    """Silence of a node's agent after which the node counts as lost."""
    node_replace_s: float = 60.0
    """How long the jobs of a lost node wait for a node of the same name. After a restart of all
    nodes this is the time for the slowest node to return."""
    snapshot_operations: int = 64
    """Operations after which a deployment that was not offloaded is snapshotted: the most that is
    repeated if a worker dies and its node does not."""
    rebuild_operations: int = 1024
    """Operations of each deployment stored with their payloads, to recompute its state if the only
    copy is lost with a node. A deployment with more operations fails with its node. 0: none."""

    def __post_init__(self) -> None:
        if "://" in self.address or self.address in ("", "local"):
            raise InvalidRequestError(
                f"--ray {self.address!r}: give the head's host:port (as `ray start` prints it), or "
                "`auto` on a machine of the cluster; Ray Client addresses are not supported"
            )
        if not self.node_dir:
            raise InvalidRequestError("node_dir is empty: name a folder of Ray's machines")
        if self.places_per_node is not None and self.places_per_node < 1:
            raise InvalidRequestError("places_per_node must be at least 1")
        if self.snapshot_operations < 1:
            raise InvalidRequestError("snapshot_operations must be at least 1")
        if self.rebuild_operations < 0:
            raise InvalidRequestError("rebuild_operations must not be negative")
        for name in ("node_grace_s", "node_replace_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise InvalidRequestError(f"{name} must be a finite number of seconds, 0 or more")

    def scheduler_settings(self) -> dict[str, Any]:
        """Settings of the scheduler that override its defaults."""
        return {
            "node_grace_s": self.node_grace_s,
            "node_replace_s": self.node_replace_s,
            "snapshot_operations": self.snapshot_operations,
            "rebuild_operations": self.rebuild_operations,
            # A snapshot is lost with its node; only the whole history of operations helps.
            "rebuild_payload_bytes_max": REBUILD_PAYLOAD_BYTES_MAX,
            "lost_nodes_return": False,
        }
