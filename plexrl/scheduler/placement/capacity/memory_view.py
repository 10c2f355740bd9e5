"""Memory on each GPU of a deployment, as placement counts it."""

from typing import TYPE_CHECKING

from plexrl.wire.messages.views import MemoryView

if TYPE_CHECKING:
    from plexrl.scheduler.placement.cluster import Cluster
    from plexrl.scheduler.state.records import Deployment


def memory_view(cluster: "Cluster", deployment: "Deployment") -> MemoryView | None:
    """The sum of a deployment's memory on each GPU; None: its need is unknown."""
    memory, group = deployment.memory, cluster.state.group_of(deployment)
    if memory is None:
        return None
    others = 0
    if group is not None:
        others = cluster.inventory.device_bytes(group)[0] - memory.kept_bytes
    return {
        "terms": [
            {"name": each.name, "nbytes": each.nbytes, "stays": each.stays} for each in memory.terms
        ],
        "need_bytes": memory.need_bytes,
        "is_measured": memory.is_measured,
        "others_keep_bytes": others,
        "gpu_memory_bytes": None if group is None else group.gpu_memory_bytes,
        "gpu_kind": "" if group is None else group.gpu_kind,
    }
