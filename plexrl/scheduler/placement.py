"""Which GPUs a deployment gets: one small class a policy (PlexRL §4.3, §6.3).

The full capacity index and trace fitting go behind the same `PlacementPolicy`; what stands here
needs no profile.
"""

from collections.abc import Sequence
from typing import Protocol

from plexrl.errors import CapacityError, ModelDoesNotFitError
from plexrl.ids import GroupId, NodeId
from plexrl.scheduler.commands import RankPlacement
from plexrl.scheduler.state import Deployment, Group, Node, State


class PlacementPolicy(Protocol):
    """Decides whether a deployment joins a group that exists."""

    def shared_group(self, state: State, deployment: Deployment) -> Group | None:
        """The group to join; None asks for a group of its own."""
        ...


class Isolated:
    """Every deployment on GPUs of its own."""

    def shared_group(self, state: State, deployment: Deployment) -> Group | None:
        del state, deployment
        return None


class Pack:
    """Training deployments of equal size share the group with the fewest members."""

    def __init__(self, residents_max: int) -> None:
        self._residents_max = residents_max

    def shared_group(self, state: State, deployment: Deployment) -> Group | None:
        if deployment.exclusive or deployment.kind != "train":
            return None
        open_groups = [
            group
            for group in state.groups.values()
            if group.shared
            and len(group.gpus) == deployment.workers
            and len(group.members) < self._residents_max
            and _host_memory_holds(state, group, deployment)
        ]
        return min(open_groups, key=lambda g: (len(g.members), g.group), default=None)


def make_policy(name: str, residents_max: int) -> PlacementPolicy:
    """The policy of that name (checked by the configuration)."""
    return Isolated() if name == "isolated" else Pack(residents_max)


def check_it_can_fit(nodes: Sequence[Node], deployment: Deployment) -> None:
    """Refuse what not even the empty cluster could hold.

    Raises:
        CapacityError: more GPUs than there are.
        ModelDoesNotFitError: a rank's state is larger than a GPU's memory, or the whole state than
            the host tier it is offloaded to.
    """
    gpus = sum(node.gpus for node in nodes)
    if deployment.workers > gpus:
        raise CapacityError(
            f"deployment {deployment.deployment!r} asks for {deployment.workers} GPUs; the cluster "
            f"has {gpus}: ask for fewer workers or add nodes",
            workers=deployment.workers,
            gpus=gpus,
        )
    per_rank = -(-deployment.state_bytes // deployment.workers)
    memory = min(node.gpu_memory_bytes for node in nodes)
    if per_rank > memory:
        needed = -(-deployment.state_bytes // memory)
        raise ModelDoesNotFitError(
            f"deployment {deployment.deployment!r} needs {per_rank} bytes on each of its "
            f"{deployment.workers} GPUs; a GPU has {memory}: ask for at least {needed} workers or "
            "a smaller model",
            bytes_per_gpu=per_rank,
            gpu_memory_bytes=memory,
        )
    host = sum(node.host_memory_bytes for node in nodes)
    if deployment.kind == "train" and not deployment.exclusive and deployment.state_bytes > host:
        raise ModelDoesNotFitError(
            f"deployment {deployment.deployment!r} has {deployment.state_bytes} bytes of state; "
            f"the cluster's host tiers hold {host}: raise them or ask for an exclusive group",
            state_bytes=deployment.state_bytes,
            host_memory_bytes=host,
        )


def free_gpus(state: State, count: int) -> tuple[RankPlacement, ...] | None:
    """`count` GPUs that no group has: on one node if any has them, else on as few as possible.

    Among nodes that suffice the one with the least to spare is taken, so that larger wishes still
    find a node; ties go to the lowest node id.
    """
    taken = {(gpu.node, gpu.gpu) for group in state.groups.values() for gpu in group.gpus}
    free: dict[NodeId, list[int]] = {
        node.node: [gpu for gpu in range(node.gpus) if (node.node, gpu) not in taken]
        for node in state.nodes.values()
        if node.alive
    }
    enough = [node for node, gpus in free.items() if len(gpus) >= count]
    if enough:
        order = [min(enough, key=lambda node: (len(free[node]), node))]
    else:
        order = sorted(free, key=lambda node: (-len(free[node]), node))
    chosen = [(node, gpu) for node in order for gpu in free[node]][:count]
    if len(chosen) < count:
        return None
    return tuple(
        RankPlacement(rank=rank, node=node, gpu=gpu) for rank, (node, gpu) in enumerate(chosen)
    )


def place(state: State, policy: PlacementPolicy, deployment: Deployment) -> Group | None:
    """Put `deployment` on a group, making one if need be; None where it must wait."""
    group = policy.shared_group(state, deployment)
    if group is None:
        gpus = free_gpus(state, deployment.workers)
        if gpus is None:
            return None
        state.groups_made += 1
        group = Group(
            group=GroupId(f"g{state.groups_made}"),
            gpus=gpus,
            shared=deployment.kind == "train" and not deployment.exclusive,
        )
        state.groups[group.group] = group
    group.members.append(deployment.deployment)
    deployment.group = group.group
    deployment.ranks = group.gpus
    return group


def _host_memory_holds(state: State, group: Group, newcomer: Deployment) -> bool:
    """All members but the resident lie in host memory; without order all of them may."""
    nodes = sorted({gpu.node for gpu in group.gpus})
    room = sum(state.nodes[node].host_memory_bytes for node in nodes)
    members = sum(state.deployments[member].state_bytes for member in group.members)
    return members + newcomer.state_bytes <= room
