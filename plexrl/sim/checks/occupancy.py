"""Who has which GPUs and memory, by what a core was told and has asked for; and the laws of that.

* A GPU belongs to one group; members of a group have the same GPUs, an exclusive one alone.
* GPUs are those of nodes that are there, of the wanted type, one for each worker.
* A GPU's memory holds a member's part; a node's host memory and NVMe hold the states of all groups
  on it that are shared.

Nothing is kept of deployments and groups that are gone. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from plexrl.scheduler.state.commands import LaunchWorkers
from plexrl.scheduler.state.events import DeploymentCreated, NodeJoined

Gpu = tuple[str, int]
"""Node and index."""


@dataclass(slots=True)
class Place:
    """A deployment, and where it is."""

    created: DeploymentCreated
    incarnation: int = 0
    """Newest launched."""
    group: str | None = None
    """Absent: it has no GPUs."""
    gpus: tuple[Gpu, ...] = ()
    ready: set[int] = field(default_factory=set)
    """Ranks that listen."""

    @property
    def is_ready(self) -> bool:
        """All its workers are there."""
        return self.group is not None and len(self.ready) == self.created.workers

    def bytes_on(self, node: str) -> int:
        """Of its state, by the ranks there."""
        ranks = sum(each == node for each, _ in self.gpus)
        return self.created.state_bytes * ranks // self.created.workers


@dataclass(slots=True)
class _Node:
    joined: NodeJoined
    is_there: bool = True
    groups: dict[str, None] = field(default_factory=dict)


class Occupancy:
    """Nodes, the groups on them and their members. `broken(what)` is called where a law is broken,
    and does not return."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self._broken = broken
        self._nodes: dict[str, _Node] = {}
        self._owners: dict[Gpu, str] = {}
        """Group of each GPU that has one."""
        self._members: dict[str, dict[str, Place]] = {}
        """By group."""

    @property
    def gpus(self) -> int:
        """Of the nodes that are there."""
        return sum(node.joined.gpus for node in self._nodes.values() if node.is_there)

    def node_joined(self, event: NodeJoined) -> None:
        """A node is there, for the first time or again."""
        known = self._nodes.get(event.node)
        groups = {} if known is None else known.groups
        self._nodes[event.node] = _Node(event, groups=groups)

    def node_lost(self, node: str) -> list[Place]:
        """A node is gone; returns who was on it."""
        known = self._nodes.get(node)
        if known is None:
            return []
        known.is_there = False
        members = [place for group in known.groups for place in self._members[group].values()]
        return [place for place in members if any(each == node for each, _ in place.gpus)]

    def is_alone(self, place: Place) -> bool:
        """Nobody shares its GPUs."""
        return place.group is None or len(self._members[place.group]) == 1

    def launched(self, place: Place, command: LaunchWorkers) -> None:
        """A deployment gets the GPUs that the command names."""
        name = command.deployment
        gpus = tuple((str(rank.node), rank.gpu) for rank in command.ranks)
        if command.incarnation == place.incarnation and place.group is not None:
            if (command.group, gpus) != (place.group, place.gpus):
                self._broken(f"{name} has incarnation {command.incarnation} in two places")
            return
        if command.incarnation <= place.incarnation:
            self._broken(
                f"{name} is launched as incarnation {command.incarnation} after {place.incarnation}"
            )
        if place.group is not None:
            self._broken(f"{name} is launched in {command.group} while it runs in {place.group}")
        self._check_gpus(place, command, gpus)
        self._check_group(place, command, gpus)
        place.incarnation, place.group, place.gpus = command.incarnation, command.group, gpus
        place.ready.clear()
        self._members.setdefault(command.group, {})[name] = place
        for gpu in gpus:
            self._owners[gpu] = command.group
            self._nodes[gpu[0]].groups[command.group] = None
        for node in {node: None for node, _ in gpus}:
            self._check_memory(node)

    def left(self, place: Place) -> None:
        """A deployment gives its GPUs back."""
        if place.group is None:
            return
        members = self._members[place.group]
        del members[place.created.deployment]
        if not members:
            del self._members[place.group]
            for gpu in place.gpus:
                del self._owners[gpu]
                self._nodes[gpu[0]].groups.pop(place.group, None)
        place.group, place.gpus = None, ()
        place.ready.clear()

    def _check_gpus(self, place: Place, command: LaunchWorkers, gpus: tuple[Gpu, ...]) -> None:
        created = place.created
        if len(set(gpus)) != created.workers:
            self._broken(
                f"{command.deployment} wants {created.workers} GPUs and gets {len(set(gpus))}"
            )
        for node, gpu in gpus:
            known = self._nodes.get(node)
            if known is None or not known.is_there:
                self._broken(f"{command.deployment} is launched on {node}, which is not there")
                continue
            joined = known.joined
            if not 0 <= gpu < joined.gpus:
                self._broken(f"{node} has {joined.gpus} GPUs, {command.deployment} gets {gpu}")
            if created.node_type not in ("", joined.node_type):
                self._broken(
                    f"{command.deployment} wants {created.node_type!r} and gets {node}, of type "
                    f"{joined.node_type!r}"
                )
            if created.state_bytes > joined.gpu_memory_bytes * created.workers:
                self._broken(
                    f"{command.deployment} has {created.state_bytes} bytes, more than "
                    f"{created.workers} GPUs of {node} hold"
                )

    def _check_group(self, place: Place, command: LaunchWorkers, gpus: tuple[Gpu, ...]) -> None:
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
                f"{command.deployment} and {other.created.deployment} have other GPUs, and both "
                f"are in {command.group}"
            )
        if other.created.exclusive or place.created.exclusive:
            self._broken(
                f"{command.deployment} and {other.created.deployment} share {command.group}, and "
                "one of them is exclusive"
            )

    def _check_memory(self, node: str) -> None:
        joined = self._nodes[node].joined
        kept = {
            name: place.bytes_on(node)
            for group in self._nodes[node].groups
            if len(self._members[group]) > 1
            for name, place in self._members[group].items()
        }
        room = joined.host_memory_bytes + joined.nvme_bytes
        if sum(kept.values()) > room:
            self._broken(
                f"{node} has {room} bytes of host memory and NVMe, for {sum(kept.values())} of "
                f"{', '.join(kept)}"
            )
