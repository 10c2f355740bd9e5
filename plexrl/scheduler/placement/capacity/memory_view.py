"""Memory on each GPU of a deployment, as placement counts it."""

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from plexrl.scheduler.placement.cluster import Cluster
    from plexrl.scheduler.state.records import Deployment


class MemoryTermView(TypedDict):
    """One summand of what a deployment needs on each GPU."""

    name: str
    nbytes: int
    stays: bool
    """It stays on the GPU while the deployment is offloaded."""


class MemoryView(TypedDict):
    """Memory on each GPU of a deployment, as placement counts it."""

    terms: list[MemoryTermView]
    need_bytes: int
    """The sum."""
    is_measured: bool
    """The activations are measured, not estimated."""
    others_keep_bytes: int
    """What the others of its group keep on each GPU while it works."""
    gpu_memory_bytes: int | None
    """Of each GPU of its group; None: it has none."""
    gpu_kind: str
    """Name of the GPUs; empty: they are virtual, and only states count."""


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
