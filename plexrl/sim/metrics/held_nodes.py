"""Measures how long each number of nodes was held by groups, for the cost of on-demand nodes.

A node is held while any group has one of its GPUs. Memory grows with the nodes, not with time.
Pure.
"""

from collections.abc import Sequence


class HeldNodes:
    """Receives the nodes that groups take and release, in order of time."""

    def __init__(self) -> None:
        self._groups: dict[str, Sequence[str]] = {}
        self._owners: dict[str, int] = {}
        """Number of groups on each held node."""
        self._seconds: dict[int, float] = {}
        """Seconds by number of held nodes."""
        self._since = 0.0

    def take(self, group: str, nodes: Sequence[str], now: float) -> None:
        """Set the nodes of a group from now on, each named once."""
        if self._groups.get(group) == nodes:
            return
        self.give(group, now)
        self._advance(now)
        self._groups[group] = nodes
        for node in nodes:
            self._owners[node] = self._owners.get(node, 0) + 1

    def give(self, group: str, now: float) -> None:
        """Release the nodes of a group, if it has any."""
        nodes = self._groups.pop(group, None)
        if nodes is None:
            return
        self._advance(now)
        for node in nodes:
            self._owners[node] -= 1
            if not self._owners[node]:
                del self._owners[node]

    def hours(self) -> tuple[tuple[int, float], ...]:
        """(number of held nodes, hours), ascending, up to the last call; hours without any held
        node are left out."""
        return tuple(
            (nodes, seconds / 3600.0) for nodes, seconds in sorted(self._seconds.items()) if nodes
        )

    def _advance(self, now: float) -> None:
        held = len(self._owners)
        if now > self._since:
            self._seconds[held] = self._seconds.get(held, 0.0) + now - self._since
        self._since = now
