"""GPUs that deployments need, and whether nodes have them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from plexrl.scheduler.placement.capacity.node_pool import NodeKind, choice_order

if TYPE_CHECKING:
    from plexrl.scheduler.placement.capacity.inventory import Inventory
    from plexrl.scheduler.state.records import Deployment, Group


class Need(NamedTuple):
    """GPUs of one kind that a deployment needs."""

    workers: int
    node_type: str
    gpu_memory_bytes: int
    """Minimum for each GPU."""


def fits_as_placed(free: Mapping[NodeKind, int], needs: Sequence[Need]) -> bool:
    """Whether `needs` get GPUs one after the other, each of the kind that the pool chooses."""
    left = dict(free)
    for need in needs:
        kinds = [kind for kind in left if left[kind] >= need.workers and suits(kind, need)]
        if not kinds:
            return False
        left[min(kinds, key=lambda kind: choice_order(kind, left[kind]))] -= need.workers
    return True


def suits(kind: NodeKind, need: Need) -> bool:
    """Whether GPUs of this kind are what is needed."""
    return need.node_type in ("", kind.node_type) and kind.gpu_memory_bytes >= need.gpu_memory_bytes


def need_of(deployment: "Deployment") -> Need:
    """The GPUs that a deployment needs."""
    per_rank = -(-deployment.state_bytes // deployment.workers)
    return Need(deployment.workers, deployment.node_type, per_rank)


def holds(inventory: "Inventory", group: "Group", deployment: "Deployment") -> bool:
    """Whether the group's GPUs are of a kind that the deployment can use, and its nodes have memory
    for one more state."""
    need = need_of(deployment)
    return (
        need.node_type in ("", group.node_type)
        and need.gpu_memory_bytes <= group.gpu_memory_bytes
        and deployment.state_bytes <= inventory.state_bytes_free(group)[1]
    )
