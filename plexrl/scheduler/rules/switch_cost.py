"""Predicts the duration of a context switch from the location of the state and measured moves.

The cost model of a move is `fixed_s + bytes / rate`, fitted for each path; the sum over a switch is
the setup cost of PlexRL §4.4. The prediction uses, in this order: the WPG's own moves on the path,
the model of the path (fitted to all WPGs on nodes of a type), the model of the reverse path, a
cautious default. Bytes are those of one node, whose ranks move at the same time; for a WPG without
GPUs, those on the GPUs that it might get.
"""

from typing import TYPE_CHECKING, Final

from plexrl.scheduler.rules.limits import bounded_bytes
from plexrl.scheduler.state.demand.estimates import LINK_BYTES_PER_S, MOVE_BYTES_PER_S, MoveLaw
from plexrl.wire.operations import OperationKind

if TYPE_CHECKING:
    from plexrl.scheduler.rules.settings import Step
    from plexrl.scheduler.state.messages.events import OperationFinished, StateReported
    from plexrl.scheduler.state.operation import Operation
    from plexrl.scheduler.state.records import Deployment, Group, State
    from plexrl.wire.messages import RankPlacement

HOST: Final = "host"
NVME: Final = "nvme"

VERSIONS_MAX: Final = 8
"""Versions of a WPG on a node's NVMe that are looked at; it keeps four at most."""

_LOAD: Final = OperationKind.LOAD
_OFFLOAD: Final = OperationKind.OFFLOAD
_PREFIXES: dict[OperationKind, str] = {kind: f"{kind.value}/" for kind in OperationKind}


def load_s(
    state: "State", deployment: "Deployment", ranks: "tuple[RankPlacement, ...] | None" = None
) -> float:
    """Predicted seconds to load the state onto the GPUs from its present tier. `ranks`: the GPUs to
    assume for a deployment that is not placed."""
    estimates = deployment.demand.estimates
    if not deployment.wpg.stored.nvme_bytes:
        known = estimates.seconds_by_kind.get(_LOAD)
        return known if known is not None else _by_model(state, deployment, _LOAD, ranks=ranks)
    known = estimates.nvme_load_seconds
    return known if known is not None else _by_model(state, deployment, _LOAD, NVME)


def offload_s(
    state: "State", deployment: "Deployment", ranks: "tuple[RankPlacement, ...] | None" = None
) -> float:
    """Predicted seconds to offload the state. `ranks`: as for `load_s`."""
    known = deployment.demand.estimates.seconds_by_kind.get(_OFFLOAD)
    return known if known is not None else _by_model(state, deployment, _OFFLOAD, ranks=ranks)


def moves_at_best_s(
    state: "State", deployment: "Deployment", ranks: "tuple[RankPlacement, ...] | None" = None
) -> tuple[float, float]:
    """(load, offload) in seconds: predicted from measured moves, otherwise at full link speed.

    Used to decide whether profiled jobs may share a group. The cautious default would be wrong
    here: a job alone on its GPUs is never offloaded, so nothing would ever be measured, and jobs
    with large states would never share. A refusal at full link speed is always right. If moves turn
    out to be slower, the measured waiting closes the group and moves the job that waits most, and
    the next job is judged by the measurement.
    """
    at_best_s = deployment.spec.state_bytes / deployment.spec.workers / LINK_BYTES_PER_S
    estimates = deployment.demand.estimates
    load_tier, own_load_s = HOST, estimates.seconds_by_kind.get(_LOAD)
    if deployment.wpg.stored.nvme_bytes:
        load_tier, own_load_s = NVME, estimates.nvme_load_seconds
    own_offload_s = estimates.seconds_by_kind.get(_OFFLOAD)
    loads = own_load_s is not None or _model(state, deployment, _LOAD, load_tier, ranks) is not None
    model = _model(state, deployment, _OFFLOAD, HOST, ranks)
    offloads = own_offload_s is not None or model is not None
    return (
        load_s(state, deployment, ranks) if loads else at_best_s,
        offload_s(state, deployment, ranks) if offloads else at_best_s,
    )


def round_trip_s(state: "State", deployment: "Deployment") -> float:
    """Predicted seconds of an offload and a load."""
    return offload_s(state, deployment) + load_s(state, deployment)


def interruption_s(state: "State", holder: "Deployment") -> float:
    """Predicted seconds without work if the holder's burst is cut for another member: two switches,
    there and back, to the member of its groups with the longest moves, and the end of the
    generations that run, which others may not join."""
    others = [
        round_trip_s(state, state.deployments[name])
        for group in state.groups_of(holder)
        for name in group.members
        if name != holder.deployment
    ]
    generating_s = holder.demand.estimates.slowest_by_kind.get(OperationKind.GENERATE, 0.0)
    return round_trip_s(state, holder) + max(others, default=0.0) + generating_s


def switch_cost(state: "State", group: "Group", deployment: "Deployment") -> float:
    """Predicted seconds until the deployment's state is on the group's GPUs: 0 for the holder,
    otherwise the holder's offload plus the deployment's load, which overlap."""
    if group.holder == deployment.deployment:
        return 0.0
    if group.holder is None:
        return load_s(state, deployment)
    holder = state.deployments[group.holder]
    return offload_s(state, holder) + load_after_s(state, holder, deployment)


def load_after_s(state: "State", leaving: "Deployment", deployment: "Deployment") -> float:
    """Predicted seconds of a load from the end of the offload of `leaving` on. Links copy in both
    directions at once, so a part of the load takes place during the offload."""
    whole_s = load_s(state, deployment)
    before_s = deployment.demand.estimates.prefetched_part * whole_s
    return whole_s - min(before_s, offload_s(state, leaving)) if before_s else whole_s


def observe_move(
    state: "State", deployment: "Deployment", operation: "Operation", event: "OperationFinished"
) -> None:
    """Update the estimates with a finished load or offload. Ignores the first load of a new model,
    which builds the model instead of moving state. The copies of a load count as a whole, also
    those before it."""
    moved, kind, seconds = event.moved, operation.kind, event.compute_s
    if kind is _LOAD and operation.seq == 0 and (moved is None or not moved.bytes_moved):
        return
    if kind is _LOAD and moved is not None and moved.bytes_moved:
        seconds += moved.prefetch_s
        if any(state.groups[group].switched for group in deployment.placement.groups):
            deployment.demand.estimates.observe_prefetch(moved.prefetched_bytes / moved.bytes_moved)
    tier = HOST if moved is None else moved.tier
    if tier == NVME and kind is _LOAD:
        deployment.demand.estimates.observe_nvme_load(seconds)
    else:
        deployment.demand.estimates.observe(kind, 0, seconds)
    nbytes = 0 if moved is None else moved.bytes_moved
    # A paced deployment moves a tiny state in the time of a large one, which is true of no other.
    if not nbytes or deployment.spec.pace:
        return
    nodes = len(deployment.placement.nodes) or 1
    models = state.move_laws
    path = _path(state, deployment.placement.ranks, kind, tier)
    model = models.get(path)
    if model is None:
        model = models[path] = MoveLaw()
    model.observe(nbytes / nodes, seconds)


def record_tier(deployment: "Deployment", tier: str) -> None:
    """Record that the whole state is in `tier`, until its nodes report otherwise."""
    nodes = deployment.placement.nodes
    per_node = deployment.spec.state_bytes // max(1, len(nodes)) if tier == NVME else 0
    deployment.wpg.stored.put_in_tier(nodes, per_node)


def state_reported(step: "Step", event: "StateReported") -> None:
    """Update the tiers of a node's states. The WPG's slowest node counts."""
    for report in event.states:
        deployment = step.state.deployments.get(report.deployment)
        if deployment is None or event.node not in deployment.placement.nodes:
            continue
        nvme_bytes = bounded_bytes(report.nvme_bytes)
        deployment.wpg.stored.report(event.node, nvme_bytes, report.on_nvme[-VERSIONS_MAX:])
        step.effects.touch_all(deployment.placement.groups)


def _by_model(
    state: "State",
    deployment: "Deployment",
    kind: OperationKind,
    tier: str = HOST,
    ranks: "tuple[RankPlacement, ...] | None" = None,
) -> float:
    if deployment.placement.ranks:
        nodes = len(deployment.placement.nodes)
    else:
        nodes = len({rank.node for rank in ranks or ()}) or 1
    nbytes = deployment.spec.state_bytes / nodes
    model = _model(state, deployment, kind, tier, ranks)
    return model.seconds(nbytes) if model is not None else nbytes / MOVE_BYTES_PER_S


def _model(
    state: "State",
    deployment: "Deployment",
    kind: OperationKind,
    tier: str,
    ranks: "tuple[RankPlacement, ...] | None",
) -> MoveLaw | None:
    """The cost model of the path on the deployment's GPUs, or on `ranks`; None: nothing
    measured."""
    models = state.move_laws
    if not models:
        return None
    there = deployment.placement.ranks or ranks or ()
    model = models.get(_path(state, there, kind, tier))
    if model is None:
        # The reverse direction uses the same links.
        back = _LOAD if kind is _OFFLOAD else _OFFLOAD
        model = models.get(_path(state, there, back, tier))
    return model


def _path(
    state: "State", ranks: "tuple[RankPlacement, ...]", kind: OperationKind, tier: str
) -> str:
    node = state.nodes.get(ranks[0].node) if ranks else None
    node_type = node.node_type if node is not None else ""
    return _PREFIXES[kind] + tier + "/" + node_type
