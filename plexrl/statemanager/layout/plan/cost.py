"""Whether a node's ranks each pull from other nodes, or the node pulls once for all of them. Pure.

Ranks that want the same tensors would each have them brought over the network. A node that brings
the union once and hands it on sends every byte over its link once, and pays for that in memory: it
stores what came, and every rank copies its own from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """What a node can do, as measured or assumed."""

    network_bytes_per_s: float = 3e9
    """Of its link, towards it."""
    memory_bytes_per_s: float = 10e9
    """Of copies between memories, all its ranks together."""

    def __post_init__(self) -> None:
        if self.network_bytes_per_s <= 0 or self.memory_bytes_per_s <= 0:
            raise InvalidRequestError("a node's link has positive rates")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoice:
    """The cheaper route, and why."""

    is_relayed: bool
    reason: str
    direct_s: float
    """Until the last rank has everything, if each pulls from the other nodes."""
    relayed_s: float
    """The same, if the node pulls once."""


def choose_route(rank_bytes: Sequence[int], union_bytes: int, link: NodeLink) -> RouteChoice:
    """Compare both routes for a node whose ranks want `rank_bytes`, together `union_bytes`."""
    wanted = sum(rank_bytes)
    direct_s = wanted / link.network_bytes_per_s
    relayed_s = (
        union_bytes / link.network_bytes_per_s + (union_bytes + wanted) / link.memory_bytes_per_s
    )
    is_relayed = relayed_s < direct_s
    reason = (
        f"{len(rank_bytes)} ranks want {wanted} bytes, {union_bytes} different ones: about "
        f"{direct_s:.3g} s each for itself, {relayed_s:.3g} s once for all"
    )
    return RouteChoice(is_relayed=is_relayed, reason=reason, direct_s=direct_s, relayed_s=relayed_s)
