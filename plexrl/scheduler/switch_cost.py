"""What a context switch will take, from where the state lies and what moves have taken so far.

A move of a WPG's state is `fixed_s + bytes / rate`, one law for each path; the sum over a
switch is the setup cost of PlexRL §4.4. A WPG that has moved this way before predicts itself;
others are predicted by the law of their path, fitted to the moves of all WPGs on nodes of a type;
a path that nothing is known of by the way back, and failing that by a cautious guess. Bytes are
those of one node, whose ranks move at once.
"""

from typing import TYPE_CHECKING

from plexrl.scheduler.estimates import MOVE_BYTES_PER_S, MoveLaw
from plexrl.wire.operations import OperationKind

if TYPE_CHECKING:
    from plexrl.scheduler.context import Context
    from plexrl.scheduler.events import OperationFinished, StateReported
    from plexrl.scheduler.state import Deployment, Group, Operation

HOST = "host"
NVME = "nvme"

WAY_BACK = {
    OperationKind.LOAD: OperationKind.OFFLOAD,
    OperationKind.OFFLOAD: OperationKind.LOAD,
}
"""Over the same links."""


def load_s(context: "Context", deployment: "Deployment", group: "Group | None" = None) -> float:
    """Predicted seconds to bring the state onto the GPUs from where it lies now.

    `group`: on whose GPUs one that has none is thought of.
    """
    estimates = deployment.estimates
    if not deployment.nvme_bytes:
        known = estimates.seconds_by_kind.get(OperationKind.LOAD)
        if known is not None:
            return known
        return _by_law(context, deployment, OperationKind.LOAD, HOST, group)
    known = estimates.nvme_load_seconds
    if known is not None:
        return known
    return _by_law(context, deployment, OperationKind.LOAD, NVME, group)


def offload_s(context: "Context", deployment: "Deployment", group: "Group | None" = None) -> float:
    """Predicted seconds to bring the state off the GPUs; `group` as for `load_s`."""
    known = deployment.estimates.seconds_by_kind.get(OperationKind.OFFLOAD)
    if known is not None:
        return known
    return _by_law(context, deployment, OperationKind.OFFLOAD, HOST, group)


def round_trip_s(context: "Context", deployment: "Deployment") -> float:
    """Predicted seconds of an offload and the load that undoes it."""
    return offload_s(context, deployment) + load_s(context, deployment)


def switch_cost(context: "Context", group: "Group", deployment: "Deployment") -> float:
    """Predicted seconds until `deployment`'s state is on the group's GPUs: 0 for the holder, else
    the holder's offload and its own load."""
    if group.holder == deployment.deployment:
        return 0.0
    cost_s = load_s(context, deployment)
    if group.holder is not None:
        cost_s += offload_s(context, context.state.deployments[group.holder])
    return cost_s


def observe_move(
    context: "Context", deployment: "Deployment", operation: "Operation", event: "OperationFinished"
) -> None:
    """Take in what a load or an offload took."""
    moved = event.moved
    tier = HOST if moved is None else moved.tier
    if operation.kind == OperationKind.LOAD and tier == NVME:
        deployment.estimates.observe_nvme_load(event.compute_s)
    else:
        deployment.estimates.observe(operation.kind, 0, event.compute_s)
    if moved is None or not moved.bytes_moved:
        return
    nodes = len({rank.node for rank in deployment.ranks}) or 1
    node = context.state.nodes.get(deployment.ranks[0].node) if deployment.ranks else None
    path = _path(operation.kind, tier, "" if node is None else node.node_type)
    law = context.state.move_laws.setdefault(path, MoveLaw())
    law.observe(moved.bytes_moved / nodes, event.compute_s)


def state_lies(deployment: "Deployment", tier: str) -> None:
    """A version was made or has arrived, all of it in `tier` until its nodes say otherwise."""
    nodes = {rank.node for rank in deployment.ranks}
    per_node = deployment.state_bytes // max(1, len(nodes)) if tier == NVME else 0
    deployment.nvme_bytes_by_node = dict.fromkeys(sorted(nodes), per_node) if per_node else {}
    deployment.nvme_bytes = per_node


def state_reported(context: "Context", event: "StateReported", now: float) -> None:
    """A node says where the state that it keeps lies now; a WPG's slowest node counts."""
    del now
    for report in event.states:
        deployment = context.state.deployments.get(report.deployment)
        if deployment is None or event.node not in {rank.node for rank in deployment.ranks}:
            continue
        by_node = deployment.nvme_bytes_by_node
        by_node[event.node] = report.nvme_bytes
        deployment.nvme_bytes = max(by_node.values())
        context.touch(deployment.group)


def _by_law(
    context: "Context",
    deployment: "Deployment",
    kind: OperationKind,
    tier: str,
    group: "Group | None",
) -> float:
    gpus = deployment.ranks or (() if group is None else group.gpus)
    nodes = len({gpu.node for gpu in gpus}) or 1
    node = context.state.nodes.get(gpus[0].node) if gpus else None
    node_type = "" if node is None else node.node_type
    nbytes = deployment.state_bytes / nodes
    laws = context.state.move_laws
    law = laws.get(_path(kind, tier, node_type))
    if law is None and tier == HOST:
        law = laws.get(_path(WAY_BACK[kind], tier, node_type))
    return law.seconds(nbytes) if law is not None else nbytes / MOVE_BYTES_PER_S


def _path(kind: OperationKind, tier: str, node_type: str) -> str:
    return f"{kind.value}/{tier}/{node_type}"
