"""Measures how long each number of nodes was held by deployments, for the cost of on-demand nodes.

A node is held while any deployment has one of its GPUs. Memory grows with the nodes, not with time.
Pure.
"""

from collections.abc import Sequence


class HeldNodes:
    """Receives the nodes that deployments take and release, in order of time."""

    def __init__(self) -> None:
        self._nodes_of: dict[str, Sequence[str]] = {}
        self._owners: dict[str, int] = {}
        """Number of deployments on each held node."""
        self._seconds: dict[int, float] = {}
        """Seconds by number of held nodes."""
        self._since = 0.0

    def take(self, deployment: str, nodes: Sequence[str], now: float) -> None:
        """Set the nodes of a deployment from now on, each named once; none: it releases them."""
        former = self._nodes_of.pop(deployment, ())
        if former == nodes:
            if nodes:
                self._nodes_of[deployment] = nodes
            return
        self._advance(now)
        for node in former:
            self._owners[node] -= 1
            if not self._owners[node]:
                del self._owners[node]
        if nodes:
            self._nodes_of[deployment] = nodes
        for node in nodes:
            self._owners[node] = self._owners.get(node, 0) + 1

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
