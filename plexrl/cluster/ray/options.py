"""What `plexrl up --ray` was asked for, beside what any cluster is."""

import math
from dataclasses import dataclass
from typing import Any

from plexrl.errors import InvalidRequestError

REBUILD_PAYLOAD_BYTES_MAX = 1 << 62
"""No bound: `rebuild_operations` alone bounds what is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """A cluster on the nodes of a Ray cluster."""

    address: str
    """Of Ray's head: `host:port`, or `auto` for the cluster that this machine is part of."""
    places_per_node: int | None = None
    """Places for workers on each node that has as many CPUs, which each takes one of; absent: the
    GPUs that Ray counts."""
    node_grace_s: float = 5.0
    """Silence of a node's agent after which the node counts as lost."""
    node_replace_s: float = 60.0
    """How long the jobs of a lost node wait for one of its name: after a restart of all, the time
    that the slowest node has to be there again."""
    snapshot_operations: int = 64
    """After which a version of a deployment that no switch has offloaded is made: the most that is
    repeated when a worker dies and its node does not."""
    rebuild_operations: int = 1024
    """Of each deployment, kept with their payloads to compute its state anew where the only copy is
    lost with its node; more than that, and its job ends as FAILED when its node does. 0: none."""

    def __post_init__(self) -> None:
        if "://" in self.address or self.address in ("", "local"):
            raise InvalidRequestError(
                f"--ray {self.address!r}: say the head's host:port (as `ray start` prints it), or "
                "`auto` on a machine of the cluster; Ray Client addresses do not do"
            )
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
        """Of the scheduler, over its defaults."""
        return {
            "node_grace_s": self.node_grace_s,
            "node_replace_s": self.node_replace_s,
            "snapshot_operations": self.snapshot_operations,
            "rebuild_operations": self.rebuild_operations,
            # A version and an earlier one are lost with their node. Only the whole past helps.
            "rebuild_payload_bytes_max": REBUILD_PAYLOAD_BYTES_MAX,
            "lost_nodes_return": False,
        }
