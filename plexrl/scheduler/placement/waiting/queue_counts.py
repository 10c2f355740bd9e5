"""Counts the deployments that wait for GPUs, and how many of them precede a given one.

A query costs O(log n) with n waiting deployments. "Precede" means a higher priority, or the same
priority and an earlier creation. Admission also weighs the tenants' shares, which change all the
time, so the count does not promise an order of admission.
"""

from typing import TYPE_CHECKING, NamedTuple

from sortedcontainers import SortedList

if TYPE_CHECKING:
    from plexrl.ids import DeploymentId


class Position(NamedTuple):
    """Sort key of a waiting deployment, ascending."""

    priority_negated: int
    created_at: float
    serial: int
    name: "DeploymentId"


if TYPE_CHECKING:
    _Positions = SortedList[Position]


class QueueCounts:
    """Positions of all waiting deployments, one sorted list for each node type."""

    def __init__(self) -> None:
        self._lists: dict[str, _Positions] = {}
        """By requested node type; empty: any."""
        self._entries: dict[DeploymentId, tuple[str, Position]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node_type: str, position: Position) -> None:
        """Add a deployment that is not counted yet."""
        self._entries[position.name] = node_type, position
        self._lists.setdefault(node_type, SortedList()).add(position)

    def remove(self, name: "DeploymentId") -> None:
        """Remove a deployment."""
        node_type, position = self._entries.pop(name)
        positions = self._lists[node_type]
        positions.remove(position)
        if not positions:
            del self._lists[node_type]

    def clear(self) -> None:
        """Remove all deployments."""
        self._lists.clear()
        self._entries.clear()

    def standing(self, name: "DeploymentId") -> tuple[int, int]:
        """(deployments that precede `name`, all others), of those that could use the same nodes."""
        node_type, position = self._entries[name]
        ahead = total = 0
        for other, positions in self._lists.items():
            if "" in (node_type, other) or node_type == other:
                ahead += positions.bisect_left(position)
                total += len(positions)
        return ahead, total - 1
