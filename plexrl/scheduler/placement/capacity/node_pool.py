"""The pool of free GPUs, searched by size, type and topology without a scan of all nodes.

The GPUs of a group are as close together as possible: on one node if one has enough free GPUs (best
fit, so that larger requests still find a node), else on neighbouring nodes of one block of the
topology (a rack, a rail), else on the fewest adjacent blocks of the narrowest part of the topology
(a row, a hall) that holds it. A group spans only nodes whose network may carry its collectives.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sortedcontainers import SortedDict, SortedList

from plexrl.ids import NodeId
from plexrl.scheduler.placement.capacity.topology import nearest_blocks
from plexrl.wire.messages import RankPlacement

if TYPE_CHECKING:
    from plexrl.scheduler.state.records import Node


TRUSTED: Final = "trusted"
"""The fabric whose nodes may share a group."""
ALONE: Final = "node "
"""Begins the fabric of a node that shares no group with others."""


@dataclass(frozen=True, slots=True, order=True)
class NodeKind:
    """Nodes of one kind are interchangeable. A group uses one kind only."""

    node_type: str
    gpu_memory_bytes: int
    """Per GPU."""
    fabric: str = ""
    """Equal for nodes that one group may span."""
    gpu_kind: str = ""
    """Name of the GPUs; empty: they are virtual."""
    speed: float = 1.0
    """Relative speed of training."""


SPEEDS: Final[dict[str, float]] = {"b200": 2.275, "h200": 1.0, "h100": 1.0, "a100": 0.315}
"""Peak dense bf16 rates (2 250, 989 and 312 TFLOP/s by NVIDIA's data sheets) relative to an H200's,
by a part of a GPU's or node type's name."""


def speed_of(node: "Node") -> float:
    """The speed of a node's GPUs: as its agent says, else by the name of the GPUs, else by the name
    of the node type; 1 if neither is known."""
    if node.speed:
        return node.speed
    for name in (node.gpu_kind.lower(), node.node_type.lower()):
        for part, speed in SPEEDS.items():
            if part in name:
                return speed
    return 1.0


def kind_of(node: "Node") -> NodeKind:
    """The kind of a node. Nodes on the scheduler's machine may share a group, and so may nodes of a
    trusted fabric; any other node is the only one of its kind."""
    fabric = ""
    if node.host:
        fabric = TRUSTED if node.fabric == TRUSTED else f"{ALONE}{node.node}"
    return NodeKind(node.node_type, node.gpu_memory_bytes, fabric, node.gpu_kind, speed_of(node))


def fabric_note(kinds: Iterable[NodeKind]) -> str:
    """Says which of these nodes share no group with others; empty: there are none."""
    alone = sorted(
        kind.fabric.removeprefix(ALONE) for kind in kinds if kind.fabric.startswith(ALONE)
    )
    if not alone:
        return ""
    some = ", ".join(alone[:3]) + (", ..." if len(alone) > 3 else "")
    return (
        f" (groups do not span {some}: their agents' configuration does not say fabric = "
        f"{TRUSTED!r}, and collectives are not encrypted)"
    )


def is_in_service(node: "Node") -> bool:
    """Whether new groups may use the node: it is alive and not drained."""
    return node.alive and not node.is_draining


@dataclass(slots=True)
class _PoolNode:
    kind: NodeKind
    block: str
    gpus: int
    free: list[int]
    """Indexes of free GPUs, ascending."""
    is_open: bool = True


@dataclass(slots=True)
class _Block:
    """The open nodes of one kind in one block of the topology, sorted by id."""

    nodes: "SortedDict[NodeId, None]" = field(default_factory=SortedDict)
    free_gpus: int = 0


@dataclass(slots=True)
class _Kind:
    by_free: "SortedList[tuple[int, NodeId]]" = field(default_factory=SortedList)
    blocks: "SortedDict[str, _Block]" = field(default_factory=SortedDict)
    free_gpus: int = 0


class NodePool:
    """The free GPUs of all open nodes."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _PoolNode] = {}
        self._kinds: SortedDict[NodeKind, _Kind] = SortedDict()

    def add(
        self, node: NodeId, kind: NodeKind, block: str, gpus: int, taken: Iterable[int]
    ) -> None:
        """Add a node; the GPUs `taken` belong to groups."""
        assert node not in self._nodes, f"{node} is in the pool already"
        free = sorted(set(range(gpus)) - set(taken))
        self._nodes[node] = _PoolNode(kind=kind, block=block, gpus=gpus, free=free)
        self._enter(node)

    def remove(self, node: NodeId) -> None:
        """Remove a node, if it is in the pool."""
        found = self._nodes.get(node)
        if found is None:
            return
        if found.is_open:
            self._leave(node)
        del self._nodes[node]

    def close(self, node: NodeId) -> None:
        """Stop using the node for new groups until it is removed and added again. Its groups
        stay."""
        found = self._nodes.get(node)
        if found is not None and found.is_open:
            self._leave(node)
            found.is_open = False

    def take(self, gpus: Sequence[RankPlacement]) -> None:
        """Mark GPUs as used by a group."""
        for node, indexes in _by_node(gpus).items():
            self._set_free(node, sorted(set(self._nodes[node].free) - indexes))

    def give_back(self, gpus: Sequence[RankPlacement]) -> None:
        """Free GPUs again, if their nodes still have them."""
        for node, indexes in _by_node(gpus).items():
            found = self._nodes.get(node)
            if found is not None:
                there = {index for index in indexes if index < found.gpus}
                self._set_free(node, sorted(there | set(found.free)))

    def snapshot(self) -> dict[NodeId, tuple[bool, tuple[int, ...]]]:
        """(is open, free GPUs) of every node, for comparisons."""
        return {
            name: (node.is_open, tuple(node.free)) for name, node in sorted(self._nodes.items())
        }

    def free_gpus(self, node_type: str = "") -> int:
        """Number of free GPUs of a type on open nodes; empty type: of all types."""
        found = 0
        for key, kind in self._kinds.items():
            if node_type in ("", key.node_type):
                found += kind.free_gpus
        return found

    def free_by_kind(self, node_type: str) -> list[tuple[NodeKind, int]]:
        """(kind, number of free GPUs) of each kind of that type; empty type: of all kinds."""
        return [
            (key, kind.free_gpus)
            for key, kind in self._kinds.items()
            if node_type in ("", key.node_type)
        ]

    def find(
        self,
        count: int,
        node_type: str,
        memory_bytes_min: int,
        suits: Callable[[NodeId, int], bool] | None = None,
        device_bytes_min: int | None = None,
        *,
        by_speed: bool = True,
        speed: float | None = None,
        only: NodeKind | None = None,
    ) -> tuple[RankPlacement, ...] | None:
        """`count` free GPUs of one kind with at least that memory each; None if there are none.

        Prefers the fastest kind, unless `by_speed` is false; then the one with the least sufficient
        memory, then the lowest name, then the fewest free GPUs. `suits(node, n)`: whether n GPUs of
        the node may be used. `device_bytes_min`: the minimum instead of `memory_bytes_min` on GPUs
        that are not virtual. `speed`: kinds of this speed only; `only`: only this kind."""
        on_gpu = memory_bytes_min if device_bytes_min is None else device_bytes_min
        kinds = [
            key
            for key in self._kinds
            if node_type in ("", key.node_type)
            and key.gpu_memory_bytes >= (on_gpu if key.gpu_kind else memory_bytes_min)
            and speed in (None, key.speed)
            and only in (None, key)
        ]
        for key in sorted(kinds, key=lambda k: choice_order(k, self._kinds[k].free_gpus, by_speed)):
            kind = self._kinds[key]
            if kind.free_gpus < count:
                continue
            if suits is not None:
                kind = self._suitable(kind, count, suits)
                if kind.free_gpus < count:
                    continue
            nodes = self._nodes_for(kind, count)
            chosen = [(node, gpu) for node in nodes for gpu in self._nodes[node].free][:count]
            return tuple(
                RankPlacement(rank=rank, node=node, gpu=gpu)
                for rank, (node, gpu) in enumerate(chosen)
            )
        return None

    def _suitable(self, kind: _Kind, count: int, suits: Callable[[NodeId, int], bool]) -> _Kind:
        """The nodes of a kind of which `count` GPUs, or all free ones, may be used."""
        found = _Kind()
        for free, node in kind.by_free:
            if free and suits(node, min(free, count)):
                _count_in(found, node, self._nodes[node])
        return found

    def _nodes_for(self, kind: _Kind, count: int) -> list[NodeId]:
        at = kind.by_free.bisect_left((count, NodeId("")))
        if at < len(kind.by_free):
            return [kind.by_free[at][1]]
        enough = [(b.free_gpus, name) for name, b in kind.blocks.items() if b.free_gpus >= count]
        if enough:
            return self._inside_block(kind.blocks[min(enough)[1]], count)
        return self._over_blocks(kind, count)

    def _inside_block(self, block: _Block, count: int) -> list[NodeId]:
        """The shortest run of neighbouring nodes with `count` free GPUs."""
        nodes = list(block.nodes)
        free = [len(self._nodes[node].free) for node in nodes]
        best: tuple[int, int, int] | None = None
        total, low = 0, 0
        for high, each in enumerate(free):
            total += each
            while total - free[low] >= count:
                total -= free[low]
                low += 1
            if total >= count and (best is None or (high - low, low) < best[:2]):
                best = (high - low, low, high)
        assert best is not None, "the block has fewer free GPUs than counted"
        return nodes[best[1] : best[2] + 1]

    def _over_blocks(self, kind: _Kind, count: int) -> list[NodeId]:
        """The nodes of the fewest adjacent blocks with `count` free GPUs, in the narrowest part of
        the topology that has them; most free GPUs first."""
        names = nearest_blocks({name: each.free_gpus for name, each in kind.blocks.items()}, count)
        blocks = [kind.blocks[name] for name in names]
        sizes = [block.free_gpus for block in blocks]
        for span in range(2, len(blocks) + 1):
            for low in range(len(blocks) - span + 1):
                if sum(sizes[low : low + span]) >= count:
                    nodes = [node for block in blocks[low : low + span] for node in block.nodes]
                    return sorted(nodes, key=lambda n: -len(self._nodes[n].free))
        raise AssertionError("the kind has fewer free GPUs than counted")

    def _set_free(self, node: NodeId, free: list[int]) -> None:
        found = self._nodes[node]
        if found.is_open:
            self._leave(node)
        found.free = free
        if found.is_open:
            self._enter(node)

    def _enter(self, node: NodeId) -> None:
        found = self._nodes[node]
        _count_in(self._kinds.setdefault(found.kind, _Kind()), node, found)

    def _leave(self, node: NodeId) -> None:
        found = self._nodes[node]
        kind = self._kinds[found.kind]
        kind.by_free.remove((len(found.free), node))
        kind.free_gpus -= len(found.free)
        block = kind.blocks[found.block]
        del block.nodes[node]
        block.free_gpus -= len(found.free)
        if not block.nodes:
            del kind.blocks[found.block]


def choice_order(
    kind: NodeKind, free_gpus: int, by_speed: bool
) -> tuple[float, int, str, int, str, str]:
    """Sort key of kinds that have enough free GPUs: the lowest is chosen. `by_speed`: the fastest
    first."""
    speed = -kind.speed if by_speed else 0.0
    return speed, kind.gpu_memory_bytes, kind.node_type, free_gpus, kind.fabric, kind.gpu_kind


def _count_in(kind: _Kind, name: NodeId, node: _PoolNode) -> None:
    kind.by_free.add((len(node.free), name))
    kind.free_gpus += len(node.free)
    block = kind.blocks.setdefault(node.block, _Block())
    block.nodes[name] = None
    block.free_gpus += len(node.free)


def _by_node(gpus: Sequence[RankPlacement]) -> dict[NodeId, set[int]]:
    found: dict[NodeId, set[int]] = {}
    for gpu in gpus:
        found.setdefault(gpu.node, set()).add(gpu.gpu)
    return found
