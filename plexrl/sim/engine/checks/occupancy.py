"""Tracks the GPUs and memory of each deployment and checks the allocation invariants. Pure.

* Each worker has one GPU, on a live node of the requested type. An exclusive one is alone.
* A GPU's memory holds a member's part. A node's host memory and NVMe hold the states of all
  deployments there that share a GPU.

It knows nothing of groups, and keeps no state of ended deployments.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
    gpus: tuple[Gpu, ...] = ()
    """Empty: the deployment has no GPUs."""
    places: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    """Number of each of its GPUs, from 0 in the order of their first use: [workers]."""
    ready: set[int] = field(default_factory=set)
    """Ranks whose workers are ready."""

    @property
    def is_ready(self) -> bool:
        """Whether all its workers are ready."""
        return bool(self.gpus) and len(self.ready) == self.created.workers

    def bytes_on(self, node: str) -> int:
        """Bytes of its state on the node, by the ranks there."""
        ranks = sum(each == node for each, _ in self.gpus)
        return self.created.state_bytes * ranks // self.created.workers


@dataclass(slots=True)
class _Node:
    joined: NodeJoined
    is_there: bool = True
    residents: dict[str, Allocation] = field(default_factory=dict)


class Occupancy:
    """Nodes, GPUs and the deployments on them. `broken(what)` is called for a broken invariant and
    must raise."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self._broken = broken
        self._nodes: dict[str, _Node] = {}
        self._places: dict[Gpu, int] = {}
        self._residents: list[dict[str, Allocation]] = []
        """Deployments by GPU."""

    @property
    def gpus(self) -> int:
        """GPUs of the live nodes."""
        return sum(node.joined.gpus for node in self._nodes.values() if node.is_there)

    def node_joined(self, event: NodeJoined) -> None:
        """Add a node, or return a lost one."""
        known = self._nodes.get(event.node)
        residents = {} if known is None else known.residents
        self._nodes[event.node] = _Node(event, residents=residents)

    def node_lost(self, node: str) -> list[Allocation]:
        """Remove a node; returns the deployments on it."""
        known = self._nodes.get(node)
        if known is None:
            return []
        known.is_there = False
        return list(known.residents.values())

    def launched(self, allocation: Allocation, command: LaunchWorkers) -> None:
        """Allocate the GPUs that the command names."""
        name = command.deployment
        gpus = tuple((str(rank.node), rank.gpu) for rank in command.ranks)
        if command.incarnation == allocation.incarnation and allocation.gpus:
            if gpus != allocation.gpus:
                self._broken(f"{name} has incarnation {command.incarnation} on other GPUs, too")
            return
        if command.incarnation <= allocation.incarnation:
            self._broken(
                f"{name} is launched as incarnation {command.incarnation} after "
                f"{allocation.incarnation}"
            )
        if allocation.gpus:
            self._broken(f"{name} is launched on {gpus[0]} while it runs on {allocation.gpus[0]}")
        self._check_gpus(allocation, command, gpus)
        allocation.incarnation, allocation.gpus = command.incarnation, gpus
        allocation.places = np.array([self._place(gpu) for gpu in gpus], dtype=np.intp)
        allocation.ready.clear()
        for place in allocation.places.tolist():
            self._residents[place][name] = allocation
        for node in {node: None for node, _ in gpus}:
            self._nodes[node].residents[name] = allocation
        self._check_exclusive(allocation)
        for node in {node: None for node, _ in gpus}:
            self._check_memory(node)

    def left(self, allocation: Allocation) -> None:
        """Release a deployment's GPUs."""
        name = allocation.created.deployment
        for place in allocation.places.tolist():
            del self._residents[place][name]
        for node in {node: None for node, _ in allocation.gpus}:
            self._nodes[node].residents.pop(name, None)
        allocation.gpus, allocation.places = (), allocation.places[:0]
        allocation.ready.clear()

    def _place(self, gpu: Gpu) -> int:
        found = self._places.get(gpu)
        if found is None:
            found = self._places[gpu] = len(self._residents)
            self._residents.append({})
        return found

    def _shares(self, allocation: Allocation) -> bool:
        return any(len(self._residents[place]) > 1 for place in allocation.places.tolist())

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

    def _check_exclusive(self, allocation: Allocation) -> None:
        for gpu, place in zip(allocation.gpus, allocation.places.tolist(), strict=True):
            there = self._residents[place]
            alone = [name for name, each in there.items() if _is_alone(each.created)]
            if alone and len(there) > 1:
                self._broken(f"{', '.join(there)} share GPU {gpu[1]} of {gpu[0]}; not {alone[0]}")

    def _check_memory(self, node: str) -> None:
        joined = self._nodes[node].joined
        kept = {
            name: allocation.bytes_on(node)
            for name, allocation in self._nodes[node].residents.items()
            if self._shares(allocation)
        }
        capacity = joined.host_memory_bytes + joined.nvme_bytes
        if sum(kept.values()) > capacity:
            self._broken(
                f"{node} has {capacity} bytes of host memory and NVMe, for {sum(kept.values())} of "
                f"{', '.join(kept)}"
            )


def _is_alone(created: DeploymentCreated) -> bool:
    """Whether it never shares its GPUs."""
    return created.exclusive and not created.shares_if_scarce
