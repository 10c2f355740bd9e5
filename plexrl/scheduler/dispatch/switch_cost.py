"""What a context switch will take, from where the state lies and what moves have taken so far.

A move of a WPG's state is `fixed_s + bytes / rate`, one law for each path; the sum over a
switch is the setup cost of PlexRL §4.4. A WPG that has moved this way before predicts itself;
others are predicted by the law of their path, fitted to the moves of all WPGs on nodes of a type,
or by that of the way back; a path that nothing is known of by a cautious guess. Bytes are those of
one node, whose ranks move at once; of a WPG that has no GPUs yet, by those that it might get.
"""

from typing import TYPE_CHECKING, Final

from plexrl.scheduler.core.limits import bounded_bytes
from plexrl.scheduler.state.estimates import LINK_BYTES_PER_S, MOVE_BYTES_PER_S, MoveLaw
from plexrl.wire.operations import OperationKind

if TYPE_CHECKING:
    from plexrl.scheduler.core.context import Context
    from plexrl.scheduler.state.commands import RankPlacement
    from plexrl.scheduler.state.events import OperationFinished, StateReported
    from plexrl.scheduler.state.operation import Operation
    from plexrl.scheduler.state.records import Deployment, Group

HOST: Final = "host"
NVME: Final = "nvme"

_LOAD: Final = OperationKind.LOAD
_OFFLOAD: Final = OperationKind.OFFLOAD
_OPENINGS: dict[OperationKind, str] = {kind: f"{kind.value}/" for kind in OperationKind}


def load_s(
    context: "Context", deployment: "Deployment", ranks: "tuple[RankPlacement, ...] | None" = None
) -> float:
    """Predicted seconds to bring the state onto the GPUs from where it lies now; on `ranks`, where
    it is not yet placed."""
    estimates = deployment.estimates
    if not deployment.stored.nvme_bytes:
        known = estimates.seconds_by_kind.get(_LOAD)
        return known if known is not None else _by_law(context, deployment, _LOAD, ranks=ranks)
    known = estimates.nvme_load_seconds
    return known if known is not None else _by_law(context, deployment, _LOAD, NVME)


def offload_s(
    context: "Context", deployment: "Deployment", ranks: "tuple[RankPlacement, ...] | None" = None
) -> float:
    """Predicted seconds to bring the state off the GPUs; off `ranks`, where it has none yet."""
    known = deployment.estimates.seconds_by_kind.get(_OFFLOAD)
    return known if known is not None else _by_law(context, deployment, _OFFLOAD, ranks=ranks)


def moves_at_best_s(
    context: "Context", deployment: "Deployment", ranks: "tuple[RankPlacement, ...] | None" = None
) -> tuple[float, float]:
    """(load, offload) in seconds: predicted where moves were measured, else at full link speed.

    This answers whether jobs of known demand may share a group. The cautious guess must not answer
    it: a job that is alone on its GPUs is never offloaded, so nothing would ever be measured, and
    jobs with large states would never share. A refusal at full link speed is right in any case. If
    moves turn out to be slower, the members' measured waiting closes the group and moves the worst
    hit, and the next job is judged by the measurement.
    """
    at_best_s = deployment.state_bytes / deployment.workers / LINK_BYTES_PER_S
    estimates = deployment.estimates
    load_tier, own_load_s = HOST, estimates.seconds_by_kind.get(_LOAD)
    if deployment.stored.nvme_bytes:
        load_tier, own_load_s = NVME, estimates.nvme_load_seconds
    own_offload_s = estimates.seconds_by_kind.get(_OFFLOAD)
    loads = own_load_s is not None or _law(context, deployment, _LOAD, load_tier, ranks) is not None
    law = _law(context, deployment, _OFFLOAD, HOST, ranks)
    offloads = own_offload_s is not None or law is not None
    return (
        load_s(context, deployment, ranks) if loads else at_best_s,
        offload_s(context, deployment, ranks) if offloads else at_best_s,
    )


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
    """Take in what a load or an offload took. The first load of a new model builds it instead of
    moving state, so it says nothing about later ones."""
    moved, kind, seconds = event.moved, operation.kind, event.compute_s
    if kind is _LOAD and operation.seq == 0 and (moved is None or not moved.bytes_moved):
        return
    tier = HOST if moved is None else moved.tier
    if tier == NVME and kind is _LOAD:
        deployment.estimates.observe_nvme_load(seconds)
    else:
        deployment.estimates.observe(kind, 0, seconds)
    nbytes = 0 if moved is None else moved.bytes_moved
    if not nbytes:
        return
    nodes = len(deployment.nodes) or 1
    laws = context.state.move_laws
    path = _path(context, deployment.ranks, kind, tier)
    law = laws.get(path)
    if law is None:
        law = laws[path] = MoveLaw()
    law.observe(nbytes / nodes, seconds)


def state_lies(deployment: "Deployment", tier: str) -> None:
    """A version was made or has arrived, all of it in `tier` until its nodes say otherwise."""
    nodes = deployment.nodes
    per_node = deployment.state_bytes // max(1, len(nodes)) if tier == NVME else 0
    deployment.stored.put_in_tier(nodes, per_node)


def state_reported(context: "Context", event: "StateReported", now: float) -> None:
    """A node says where the state that it keeps lies now; a WPG's slowest node counts."""
    del now
    for report in event.states:
        deployment = context.state.deployments.get(report.deployment)
        if deployment is None or event.node not in deployment.nodes:
            continue
        deployment.stored.report(event.node, bounded_bytes(report.nvme_bytes))
        context.touch(deployment.group)


def _by_law(
    context: "Context",
    deployment: "Deployment",
    kind: OperationKind,
    tier: str = HOST,
    ranks: "tuple[RankPlacement, ...] | None" = None,
) -> float:
    if deployment.ranks:
        nodes = len(deployment.nodes)
    else:
        nodes = len({rank.node for rank in ranks or ()}) or 1
    nbytes = deployment.state_bytes / nodes
    law = _law(context, deployment, kind, tier, ranks)
    return law.seconds(nbytes) if law is not None else nbytes / MOVE_BYTES_PER_S


def _law(
    context: "Context",
    deployment: "Deployment",
    kind: OperationKind,
    tier: str,
    ranks: "tuple[RankPlacement, ...] | None",
) -> MoveLaw | None:
    """What is known of the path on the GPUs that the deployment has, or on `ranks`."""
    there = deployment.ranks or ranks or ()
    laws = context.state.move_laws
    law = laws.get(_path(context, there, kind, tier))
    if law is None:
        # The bytes of the other direction go over the same links.
        back = _LOAD if kind is _OFFLOAD else _OFFLOAD
        law = laws.get(_path(context, there, back, tier))
    return law


def _path(
    context: "Context", ranks: "tuple[RankPlacement, ...]", kind: OperationKind, tier: str
) -> str:
    node = context.state.nodes.get(ranks[0].node) if ranks else None
    node_type = node.node_type if node is not None else ""
    return _OPENINGS[kind] + tier + "/" + node_type
