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
    """Minimum for each virtual GPU: the state."""
    device_bytes: int = 0
    """Minimum for each real GPU: the whole sum."""
    by_speed: bool = True
    """Whether faster GPUs are preferred. A rollout's speed is not known, so rollouts leave fast
    GPUs to training."""

    def on(self, gpu_kind: str) -> int:
        """Minimum for each GPU of this kind; empty: a virtual one."""
        return self.device_bytes if gpu_kind else self.gpu_memory_bytes


def fits_as_placed(free: Mapping[NodeKind, int], needs: Sequence[Need]) -> bool:
    """Whether `needs` get GPUs one after the other, each of the kind that the pool chooses."""
    left = dict(free)
    for need in needs:
        kinds = [kind for kind in left if left[kind] >= need.workers and suits(kind, need)]
        if not kinds:
            return False
        order = {kind: choice_order(kind, left[kind], need.by_speed) for kind in kinds}
        left[min(order, key=order.__getitem__)] -= need.workers
    return True


def suits(kind: NodeKind, need: Need) -> bool:
    """Whether GPUs of this kind are what is needed."""
    if need.node_type not in ("", kind.node_type):
        return False
    return kind.gpu_memory_bytes >= need.on(kind.gpu_kind)


def placement_rank(deployment: "Deployment") -> tuple[bool, int, bool, int, int]:
    """Sort key of deployments that get GPUs together: first those with the fewest choices."""
    need = need_of(deployment)
    return (
        not need.node_type,
        -need.workers,
        deployment.spec.shares,
        -need.gpu_memory_bytes,
        -need.device_bytes,
    )


def node_types_compatible(one_type: str, other_type: str) -> bool:
    """Whether two requested node types may mean the same node; empty: any type."""
    return "" in (one_type, other_type) or one_type == other_type


def need_of(deployment: "Deployment") -> Need:
    """The GPUs that a deployment needs."""
    per_rank = -(-deployment.spec.state_bytes // deployment.spec.workers)
    on_gpu = per_rank if deployment.demand.memory is None else deployment.demand.memory.need_bytes
    by_speed = deployment.spec.kind != "rollout"
    return Need(deployment.spec.workers, deployment.spec.node_type, per_rank, on_gpu, by_speed)


def kept_bytes(deployment: "Deployment") -> int:
    """What stays on each of its GPUs while others work there."""
    return 0 if deployment.demand.memory is None else deployment.demand.memory.kept_bytes


def least_memory(gpu_kind: str, deployments: Sequence["Deployment"]) -> int:
    """Memory of each GPU of this kind that lets `deployments` work there in turns."""
    if not gpu_kind:
        return max([need_of(deployment).gpu_memory_bytes for deployment in deployments], default=0)
    alone = [
        need_of(deployment).device_bytes - kept_bytes(deployment) for deployment in deployments
    ]
    return sum([kept_bytes(deployment) for deployment in deployments]) + max(alone, default=0)


def _bytes_on(deployment: "Deployment", group: "Group") -> int:
    """As large as the state would be if the deployment were on all GPUs of the group alone."""
    return deployment.spec.state_bytes * len(group.gpus) // deployment.spec.workers


def holds(inventory: "Inventory", group: "Group", deployment: "Deployment") -> bool:
    """Whether the group's GPUs are of a kind that the deployment can use, and its nodes have memory
    for one more state."""
    need = need_of(deployment)
    return (
        need.node_type in ("", group.node_type)
        and need.on(group.gpu_kind) <= group.gpu_memory_bytes
        and inventory.fits_on_device(group, deployment)
        and _bytes_on(deployment, group) <= inventory.state_bytes_free(group)[1]
    )
