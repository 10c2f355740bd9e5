"""Tracks the GPUs and memory of each deployment and checks the allocation invariants. Pure.

* A GPU belongs to one group. Members of a group have the same GPUs; an exclusive member is alone.
* Each worker has one GPU, on a live node of the requested type.
* A GPU's memory holds a member's part. A node's host memory and NVMe hold the states of all shared
  groups on the node.

No state of ended deployments and groups is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from plexrl.scheduler.state.messages.events import DeploymentCreated, NodeJoined
from plexrl.wire.messages import LaunchWorkers

Gpu = tuple[str, int]
"""Node and index."""


@dataclass(slots=True)
class Allocation:
    """A deployment and its allocation."""

    created: DeploymentCreated
    incarnation: int = 0
    """Newest launched incarnation."""
    group: str | None = None
    """Absent: the deployment has no GPUs."""
    gpus: tuple[Gpu, ...] = ()
    ready: set[int] = field(default_factory=set)
    """Ranks whose workers are ready."""

    @property
    def is_ready(self) -> bool:
        """Whether all its workers are ready."""
        return self.group is not None and len(self.ready) == self.created.workers

    def bytes_on(self, node: str) -> int:
        """Bytes of its state on the node, by the ranks there."""
        ranks = sum(each == node for each, _ in self.gpus)
        return self.created.state_bytes * ranks // self.created.workers


@dataclass(slots=True)
class _Node:
    joined: NodeJoined
    is_there: bool = True
    groups: dict[str, None] = field(default_factory=dict)


class Occupancy:
    """Nodes, their groups and the members. `broken(what)` is called for a broken invariant and must
    raise."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self._broken = broken
        self._nodes: dict[str, _Node] = {}
        self._owners: dict[Gpu, str] = {}
        """Group of each allocated GPU."""
        self._members: dict[str, dict[str, Allocation]] = {}
        """Members by group and deployment."""

    @property
    def gpus(self) -> int:
        """GPUs of the live nodes."""
        return sum(node.joined.gpus for node in self._nodes.values() if node.is_there)

    def node_joined(self, event: NodeJoined) -> None:
        """Add a node, or return a lost one."""
        known = self._nodes.get(event.node)
        groups = {} if known is None else known.groups
        self._nodes[event.node] = _Node(event, groups=groups)

    def node_lost(self, node: str) -> list[Allocation]:
        """Remove a node; returns the deployments on it."""
        known = self._nodes.get(node)
        if known is None:
            return []
        known.is_there = False
        members = [
            allocation for group in known.groups for allocation in self._members[group].values()
        ]
        return [
            allocation for allocation in members if any(each == node for each, _ in allocation.gpus)
        ]

    def is_alone(self, allocation: Allocation) -> bool:
        """Whether no other deployment shares its GPUs."""
        return allocation.group is None or len(self._members[allocation.group]) == 1

    def launched(self, allocation: Allocation, command: LaunchWorkers) -> None:
        """Allocate the GPUs that the command names."""
        name = command.deployment
        gpus = tuple((str(rank.node), rank.gpu) for rank in command.ranks)
        if command.incarnation == allocation.incarnation and allocation.group is not None:
            if (command.group, gpus) != (allocation.group, allocation.gpus):
                self._broken(f"{name} has incarnation {command.incarnation} on two groups")
            return
        if command.incarnation <= allocation.incarnation:
            self._broken(
                f"{name} is launched as incarnation {command.incarnation} after "
                f"{allocation.incarnation}"
            )
        if allocation.group is not None:
            self._broken(
                f"{name} is launched in {command.group} while it runs in {allocation.group}"
            )
        self._check_gpus(allocation, command, gpus)
        self._check_group(allocation, command, gpus)
        allocation.incarnation, allocation.group, allocation.gpus = (
            command.incarnation,
            command.group,
            gpus,
        )
        allocation.ready.clear()
        self._members.setdefault(command.group, {})[name] = allocation
        for gpu in gpus:
            self._owners[gpu] = command.group
            self._nodes[gpu[0]].groups[command.group] = None
        for node in {node: None for node, _ in gpus}:
            self._check_memory(node)

    def left(self, allocation: Allocation) -> None:
        """Release a deployment's GPUs."""
        if allocation.group is None:
            return
        members = self._members[allocation.group]
        del members[allocation.created.deployment]
        if not members:
            del self._members[allocation.group]
            for gpu in allocation.gpus:
                del self._owners[gpu]
                self._nodes[gpu[0]].groups.pop(allocation.group, None)
        allocation.group, allocation.gpus = None, ()
        allocation.ready.clear()

    def _check_gpus(
        self, allocation: Allocation, command: LaunchWorkers, gpus: tuple[Gpu, ...]
    ) -> None:
        created = allocation.created
        if len(set(gpus)) != created.workers:
            self._broken(
                f"{command.deployment} needs {created.workers} GPUs but gets {len(set(gpus))}"
            )
        for node, gpu in gpus:
            known = self._nodes.get(node)
            if known is None or not known.is_there:
                self._broken(f"{command.deployment} is launched on {node}, which is not live")
                continue
            joined = known.joined
            if not 0 <= gpu < joined.gpus:
                self._broken(f"{node} has {joined.gpus} GPUs but {command.deployment} gets {gpu}")
            if created.node_type not in ("", joined.node_type):
                self._broken(
                    f"{command.deployment} needs {created.node_type!r} but gets {node}, of type "
                    f"{joined.node_type!r}"
                )
            if created.state_bytes > joined.gpu_memory_bytes * created.workers:
                self._broken(
                    f"{command.deployment} has {created.state_bytes} bytes, more than "
                    f"{created.workers} GPUs of {node} hold"
                )

    def _check_group(
        self, allocation: Allocation, command: LaunchWorkers, gpus: tuple[Gpu, ...]
    ) -> None:
        for gpu in gpus:
            owner = self._owners.get(gpu, command.group)
            if owner != command.group:
                self._broken(
                    f"GPU {gpu[1]} of {gpu[0]} belongs to {owner} and is given to {command.group}"
                )
        others = self._members.get(command.group)
        if not others:
            return
        other = next(iter(others.values()))
        if set(other.gpus) != set(gpus):
            self._broken(
                f"{command.deployment} and {other.created.deployment} have different GPUs in one "
                f"group, {command.group}"
            )
        if other.created.exclusive or allocation.created.exclusive:
            self._broken(
                f"{command.deployment} and {other.created.deployment} share {command.group}, and "
                "one of them is exclusive"
            )

    def _check_memory(self, node: str) -> None:
        joined = self._nodes[node].joined
        kept = {
            name: allocation.bytes_on(node)
            for group in self._nodes[node].groups
            if len(self._members[group]) > 1
            for name, allocation in self._members[group].items()
        }
        capacity = joined.host_memory_bytes + joined.nvme_bytes
        if sum(kept.values()) > capacity:
            self._broken(
                f"{node} has {capacity} bytes of host memory and NVMe, for {sum(kept.values())} of "
                f"{', '.join(kept)}"
            )
