"""Where the durable version of a WPG lies."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from plexrl.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """The newest version that a `publish` operation of a trainer made."""

    seq: int
    trainer_step: int
    """Optimizer steps in it."""
    nodes: tuple[NodeId, ...]
    """Nodes whose StateManagers hold it."""


@dataclass(slots=True, kw_only=True)
class StoredVersion:
    """The nodes and tiers of version `durable_seq`."""

    nodes: list[NodeId] = field(default_factory=list)
    """Nodes whose StateManagers hold the version."""
    awaited_nodes: list[NodeId] = field(default_factory=list)
    """Nodes to which the version is being copied."""
    nvme_bytes: int = 0
    """Bytes on NVMe alone, on the node that has most there; 0: all is in host memory."""
    nvme_bytes_by_node: dict[NodeId, int] = field(default_factory=dict)
    on_nvme: dict[NodeId, tuple[int, ...]] = field(default_factory=dict)
    """All versions of this WPG that are on NVMe, by node: they survive a power cut."""

    def move_to(self, nodes: Iterable[NodeId]) -> None:
        """Record that exactly these nodes hold the version."""
        self.nodes = list(nodes)

    def keep_only(self, nodes: Collection[NodeId]) -> None:
        """The nodes that are not among `nodes` drop the version."""
        self.nodes = [node for node in self.nodes if node in nodes]

    def lose(self) -> None:
        """No node holds the version."""
        self.nodes = []
        self.on_nvme.clear()
        self.forget_tier()

    def forget_tier(self) -> None:
        """The tier of the version is not known."""
        self.nvme_bytes = 0
        self.nvme_bytes_by_node.clear()

    def put_in_tier(self, nodes: Iterable[NodeId], nvme_bytes: int) -> None:
        """Each of `nodes` holds so many bytes of the version on NVMe alone."""
        if nvme_bytes:
            self.nvme_bytes_by_node = dict.fromkeys(nodes, nvme_bytes)
        else:
            self.nvme_bytes_by_node.clear()
        self.nvme_bytes = nvme_bytes

    def is_on_nvme(self, seq: int) -> bool:
        """Whether NVMe has version `seq` on all nodes."""
        return bool(self.nodes) and all(seq in self.on_nvme.get(node, ()) for node in self.nodes)

    def report(self, node: NodeId, nvme_bytes: int, on_nvme: tuple[int, ...]) -> None:
        """A node reported how many bytes of the version it holds on NVMe alone, and all versions
        that it has there."""
        self.nvme_bytes_by_node[node] = nvme_bytes
        self.on_nvme[node] = on_nvme
        self.nvme_bytes = max(self.nvme_bytes_by_node.values())

    def await_copies(self, nodes: list[NodeId]) -> None:
        """The version is being copied to these nodes."""
        self.awaited_nodes = nodes

    def stop_awaiting(self) -> None:
        """No copy is awaited."""
        self.awaited_nodes.clear()

    def copied_to(self, node: NodeId) -> bool:
        """A node has its copy. True once all awaited nodes have theirs."""
        self.awaited_nodes.remove(node)
        return not self.awaited_nodes
