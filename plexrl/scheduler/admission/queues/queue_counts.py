"""How many deployments wait for GPUs, and how many of them precede a given one.

The answer costs O(log n) with n deployments waiting. "Precede" means a higher priority, or the same
priority and an earlier creation. The admission also weighs tenants' shares, which change all the
time, so this is no promise of the order of turns.
"""

from typing import TYPE_CHECKING, NamedTuple

from sortedcontainers import SortedList

if TYPE_CHECKING:
    from plexrl.ids import DeploymentId


class Place(NamedTuple):
    """Sort key of a waiting deployment: what comes first sorts first."""

    priority_negated: int
    created_at: float
    name: "DeploymentId"


if TYPE_CHECKING:
    _Places = SortedList[Place]


class QueueCounts:
    """Places of all waiting deployments, one sorted list for each node type."""

    def __init__(self) -> None:
        self._lists: dict[str, _Places] = {}
        """By the node type that is asked for; empty: any."""
        self._filed: dict[DeploymentId, tuple[str, Place]] = {}

    def __len__(self) -> int:
        return len(self._filed)

    def add(self, node_type: str, place: Place) -> None:
        """Count a deployment, which is not counted yet."""
        self._filed[place.name] = node_type, place
        self._lists.setdefault(node_type, SortedList()).add(place)

    def remove(self, name: "DeploymentId") -> None:
        """Stop counting a deployment."""
        node_type, place = self._filed.pop(name)
        places = self._lists[node_type]
        places.remove(place)
        if not places:
            del self._lists[node_type]

    def clear(self) -> None:
        """Count nobody."""
        self._lists.clear()
        self._filed.clear()

    def standing(self, name: "DeploymentId") -> tuple[int, int]:
        """(deployments that precede `name`, all others) of those that could want the same nodes."""
        node_type, place = self._filed[name]
        ahead = total = 0
        for other, places in self._lists.items():
            if "" in (node_type, other) or node_type == other:
                ahead += places.bisect_left(place)
                total += len(places)
        return ahead, total - 1
