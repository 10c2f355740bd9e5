"""Until when a group is busy, and by how much what it does is late, by the estimates."""

from plexrl.ids import OperationId
from plexrl.scheduler.dispatch.candidates.readiness import candidate, queued_s
from plexrl.scheduler.operations.deadlines.durations import run_s
from plexrl.scheduler.rules.switch_cost import load_s, offload_s
from plexrl.scheduler.state.demand.estimates import OPERATION_S
from plexrl.scheduler.state.group_lock import is_switched
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationKind

SOON_S = 1e-3
"""The shortest time until a group that is busy now is free."""

OVERDUE_S_MIN = 1.0
"""What is late by less is not called overdue."""


def group_free_s(state: State, group: Group, now: float) -> float:
    """Estimated seconds until the holder's burst is over; 0 without a holder."""
    if group.holder is None:
        return 0.0
    holder = state.deployment(group.holder)
    if holder.spec.preemptible and holder.wpg.moving is None:
        # It gives way at once.
        return 0.0
    if holder.wpg.moving is not None and holder.wpg.moving.kind == OperationKind.OFFLOAD:
        return _left_s(state, holder.wpg.moving.operation, holder, now)
    demand = holder.demand
    running_s = under_way_s(state, holder, now)
    burst_s = 0.0
    if demand.burst.started_at is not None:
        elapsed_s = now - demand.burst.started_at
        burst_s = max(0.0, demand.burst_s(demand.burst.tokens) - elapsed_s)
    return max(running_s + queued_s(state, holder, len(holder.work.queue)), burst_s)


def last_free_group(state: State, deployment: Deployment, now: float) -> Group | None:
    """The group of the deployment that is expected to be free last; None: it has no group."""
    groups = state.groups_of(deployment)
    if len(groups) < 2:
        return groups[0] if groups else None
    return max(groups, key=lambda each: group_free_s(state, each, now))


def under_way_s(state: State, deployment: Deployment, now: float) -> float:
    """Estimated seconds until what the deployment runs, or the move of its state, is over."""
    if deployment.wpg.moving is not None:
        return _left_s(state, deployment.wpg.moving.operation, deployment, now)
    return max(
        (_left_s(state, name, deployment, now) for name in deployment.work.running), default=0.0
    )


def overdue_s(state: State, deployment: Deployment, now: float) -> float:
    """Seconds by which what the deployment runs, or the move of its state, has passed its estimate;
    0 if it has not, or by less than a second, or was not measured yet."""
    late_s = max(
        (
            -_until_end_s(state, operation.operation, deployment, now)
            for operation in _under_way(state, deployment)
            if run_s(state, deployment, operation) is not None
        ),
        default=0.0,
    )
    return late_s if late_s > OVERDUE_S_MIN else 0.0


def is_of_unknown_length(state: State, deployment: Deployment) -> bool:
    """Whether something runs of which nothing tells when it ends."""
    return any(
        run_s(state, deployment, operation) is None for operation in _under_way(state, deployment)
    )


def _under_way(state: State, deployment: Deployment) -> list[Operation]:
    """What the deployment runs, with the move of its state."""
    names = [*deployment.work.running]
    if deployment.wpg.moving is not None:
        names.append(deployment.wpg.moving.operation)
    return [state.operations[name] for name in names]


def expected_free_s(state: State, group: Group, now: float) -> float:
    """Estimated seconds until the holder and the incoming member have ended their bursts, and the
    last of them is offloaded; above 0."""
    found_s = group_free_s(state, group, now)
    last = None if group.holder is None else state.deployments[group.holder]
    if group.incoming is not None:
        last = state.deployments[group.incoming]
        queued = queued_s(state, last, len(last.work.queue))
        found_s += load_s(state, last) + max(queued, last.demand.burst_s(0))
    if last is not None:
        found_s += offload_s(state, last)
    return max(found_s, SOON_S)


def turn_s(state: State, deployment: Deployment) -> float:
    """Estimated seconds until its groups are free again if `deployment` gets them now."""
    asked = candidate(state, deployment)
    return asked.setup_s + asked.service_s + offload_s(state, deployment)


def _left_s(state: State, name: OperationId, deployment: Deployment, now: float) -> float:
    return max(0.0, _until_end_s(state, name, deployment, now))


def _until_end_s(state: State, name: OperationId, deployment: Deployment, now: float) -> float:
    """Estimated seconds until an operation ends; negative once that has passed."""
    operation = state.operations[name]
    sent_at = deployment.work.sent_at(operation)
    began_at = now if sent_at is None else sent_at
    if operation.kind == OperationKind.LOAD:
        whole_s = load_s(state, deployment)
        if is_switched(state, deployment):
            whole_s *= 1.0 - deployment.demand.estimates.prefetched_part
    else:
        known_s = run_s(state, deployment, operation)
        whole_s = OPERATION_S if known_s is None else known_s
    return whole_s - (now - began_at)
