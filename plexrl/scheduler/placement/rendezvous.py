"""Where the ranks of a WPG meet: at a file on one machine, or at a port on the node of rank 0.

Invariants:
- Ranks that are on one node, or on nodes of the scheduler's machine, meet at a file.
- No two WPGs on a node have the same port.
- A port is taken again as late as possible, so that a process of an earlier incarnation that still
  looks for its ranks does not find others.
"""

from typing import TYPE_CHECKING

from plexrl.scheduler.placement.capacity.node_pool import kind_of
from plexrl.wire.links.address import host_port

if TYPE_CHECKING:
    from plexrl.ids import NodeId
    from plexrl.scheduler.state.records import Deployment, Node, State


def meets_at_port(state: "State", deployment: "Deployment") -> bool:
    """Whether the ranks are on several machines."""
    return len(deployment.placement.nodes) > 1 and bool(_meeting_node(state, deployment).host)


def may_span(state: "State", deployment: "Deployment") -> bool:
    """Whether the ranks' network is still allowed to carry their collectives, as far as the nodes
    that are connected say: a node may have come back with another configuration."""
    if len(deployment.placement.nodes) < 2:
        return True
    alive = [node for name in deployment.placement.nodes if (node := state.nodes[name]).alive]
    return len({kind_of(node).fabric for node in alive}) < 2


def rendezvous(state: "State", deployment: "Deployment") -> str:
    """`host:port` at which the ranks of the present incarnation meet; empty: at a file."""
    port = deployment.wpg.processes.port
    if not port:
        return ""
    return host_port(_meeting_node(state, deployment).host, port)


def take_port(state: "State", deployment: "Deployment") -> int:
    """Take the next free port of the node of rank 0; 0: there is none."""
    node = _meeting_node(state, deployment)
    first, last = node.ports
    if not first:
        return 0
    taken = ports_taken(state, node.node)
    count = last - first + 1
    start = node.last_port + 1 - first if first <= node.last_port <= last else 0
    # One of the first `len(taken) + 1` ports is free, if any is.
    for step in range(min(count, len(taken) + 1)):
        port = first + (start + step) % count
        if port not in taken:
            node.last_port = port
            return port
    return 0


def ports_taken(state: "State", node: "NodeId") -> set[int]:
    """The ports on a node at which ranks of the present incarnations meet."""
    found = set()
    for group in state.groups.values():
        for name in group.members:
            deployment = state.deployments[name]
            if deployment.wpg.processes.port and deployment.placement.ranks[0].node == node:
                found.add(deployment.wpg.processes.port)
    return found


def no_port_reason(state: "State", deployment: "Deployment") -> str:
    """Why `take_port` found none."""
    node = _meeting_node(state, deployment)
    first, last = node.ports
    if not first:
        return (
            f"node {node.node!r} announces no ports, and WPGs that span nodes meet at one: set "
            "`ports` in the configuration of its agent"
        )
    return (
        f"other WPGs meet at all ports {first} to {last} of node {node.node!r}: announce more "
        "ports, or wait until one of them ends"
    )


def _meeting_node(state: "State", deployment: "Deployment") -> "Node":
    return state.nodes[deployment.placement.ranks[0].node]
