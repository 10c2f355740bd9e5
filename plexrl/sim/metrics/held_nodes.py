"""How long groups held how many nodes: what on-demand nodes are paid by. Pure.

A node is held while any group has a GPU of it. Memory grows with the nodes, not with time.
"""

from collections.abc import Sequence


class HeldNodes:
    """Told of groups that take nodes and give them back, in the order of time."""

    def __init__(self) -> None:
        self._groups: dict[str, Sequence[str]] = {}
        self._owners: dict[str, int] = {}
        """Groups on each node that has any."""
        self._seconds: dict[int, float] = {}
        """By the number of nodes held."""
        self._since = 0.0

    def take(self, group: str, nodes: Sequence[str], now: float) -> None:
        """The group has GPUs of these nodes, each named once, from now on, and of no others."""
        if self._groups.get(group) == nodes:
            return
        self.give(group, now)
        self._reach(now)
        self._groups[group] = nodes
        for node in nodes:
            self._owners[node] = self._owners.get(node, 0) + 1

    def give(self, group: str, now: float) -> None:
        """The group has no GPUs any more; a group that never took any is none."""
        nodes = self._groups.pop(group, None)
        if nodes is None:
            return
        self._reach(now)
        for node in nodes:
            self._owners[node] -= 1
            if not self._owners[node]:
                del self._owners[node]

    def hours(self) -> tuple[tuple[int, float], ...]:
        """(nodes held at once, hours for which that many were), ascending, up to what was told
        last; hours without any node are left out."""
        return tuple(
            (nodes, seconds / 3600.0) for nodes, seconds in sorted(self._seconds.items()) if nodes
        )

    def _reach(self, now: float) -> None:
        held = len(self._owners)
        if now > self._since:
            self._seconds[held] = self._seconds.get(held, 0.0) + now - self._since
        self._since = now
