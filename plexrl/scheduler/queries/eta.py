"""Estimates when a waiting deployment gets its group, and measures the error of the estimates.

For a sample of the bursts that have to wait, the estimate and its 80 % interval are made on arrival
and later compared with the real start. The errors give the next intervals
(`state.demand.wait_intervals`).
"""

from itertools import accumulate

from plexrl.ids import OperationId
from plexrl.scheduler.dispatch.candidates.readiness import candidate, queued_s, wants_the_group
from plexrl.scheduler.rules.hrrs import Candidate
from plexrl.scheduler.rules.ordering import SortKey, sort_key
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.rules.switch_cost import load_after_s, load_s, offload_s
from plexrl.scheduler.state.demand.wait_intervals import interval
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import RATIO_BOUNDS, Deployment, EtaErrors, Group, State
from plexrl.wire.messages.cluster_views import EtaQualityView
from plexrl.wire.operations import OperationKind

SAMPLE_EACH = 8
"""One in this many waits is estimated on arrival, which measures the error at an eighth of the
cost. Explicit queries are always answered."""
SAMPLE_ALL = 1000
"""So many waits of a cluster are all estimated before that, so that a small or new one soon knows
its errors."""


OVERDUE_S_MIN = 1.0
"""What is late by less is not called overdue."""


def group_free_s(state: State, group: Group, now: float) -> float:
    """Estimated seconds until the holder's burst is over; 0 without a holder."""
    if group.holder is None:
        return 0.0
    holder = state.deployment(group.holder)
    if holder.preemptible and holder.moving is None:
        # It gives way at once.
        return 0.0
    if holder.moving is not None and holder.moving.kind == OperationKind.OFFLOAD:
        return _left_s(state, holder.moving.operation, holder, now)
    estimates = holder.estimates
    running_s = under_way_s(state, holder, now)
    burst_s = 0.0
    if holder.burst.started_at is not None:
        elapsed_s = now - holder.burst.started_at
        burst_s = max(0.0, estimates.burst_s(holder.burst.tokens) - elapsed_s)
    return max(running_s + queued_s(state, holder, len(holder.queue)), burst_s)


def under_way_s(state: State, deployment: Deployment, now: float) -> float:
    """Estimated seconds until what the deployment runs, or the move of its state, is over."""
    if deployment.moving is not None:
        return _left_s(state, deployment.moving.operation, deployment, now)
    return max((_left_s(state, name, deployment, now) for name in deployment.running), default=0.0)


def overdue_s(state: State, deployment: Deployment, now: float) -> float:
    """Seconds by which what the deployment runs, or the move of its state, has passed its estimate;
    0 if it has not, or by less than a second."""
    names = [*deployment.running]
    if deployment.moving is not None:
        names.append(deployment.moving.operation)
    late_s = max((-_until_end_s(state, name, deployment, now) for name in names), default=0.0)
    return late_s if late_s > OVERDUE_S_MIN else 0.0


def goes_before(
    state: State, settings: Settings, group: Group, deployment: Deployment, now: float
) -> list[Candidate]:
    """Waiting members that go before `deployment`, in order."""
    return _before(state, settings, group, deployment, candidate(state, group, deployment), now)


def _before(
    state: State,
    settings: Settings,
    group: Group,
    deployment: Deployment,
    burst: Candidate,
    now: float,
) -> list[Candidate]:
    """Waiting members that go before `burst`, that of `deployment`, in order."""
    ordering, bound_s = settings.ordering, settings.config.starvation_bound_s
    own = sort_key(ordering, burst, now, bound_s)
    found: list[tuple[SortKey, Candidate]] = []
    for name in group.members:
        if name in (deployment.deployment, group.holder):
            continue
        rival = state.deployment(name)
        if not rival.queue or not wants_the_group(state, rival, now):
            continue
        other = candidate(state, group, rival)
        key = sort_key(ordering, other, now, bound_s)
        if key < own:
            found.append((key, other))
    # Keys end in the member's name: no two are equal, so candidates are not compared.
    found.sort()
    return [other for _, other in found]


def start_s(
    state: State, settings: Settings, group: Group, deployment: Deployment, now: float
) -> float:
    """Estimated seconds until the head of `deployment`'s queue starts on its group."""
    if group.holder == deployment.deployment:
        return under_way_s(state, deployment, now)
    if group.incoming == deployment.deployment:
        assert group.holder is not None, "a group with an incoming member has a holder"
        holder = state.deployment(group.holder)
        return group_free_s(state, group, now) + load_after_s(state, holder, deployment)
    own = candidate(state, group, deployment)
    ahead_s = sum(
        [
            each.service_s + each.setup_s
            for each in _before(state, settings, group, deployment, own, now)
        ]
    )
    return group_free_s(state, group, now) + ahead_s + own.setup_s


def record_estimate(
    state: State, settings: Settings, deployment: Deployment, operation: Operation, now: float
) -> None:
    """Record the estimated start of an operation that has to wait for its group."""
    group = state.group_of(deployment)
    if group is None or group.holder == deployment.deployment or len(deployment.queue) > 1:
        return
    alone = len(group.members) == 1 and not group.fillers
    if alone or deployment.preemptible or not deployment.is_ready:
        return
    errors = state.eta_errors
    errors.waits += 1
    if errors.waits % SAMPLE_EACH == 1 or errors.waits <= SAMPLE_ALL:
        wait_s = start_s(state, settings, group, deployment, now)
        low_s, high_s = interval(group.wait_errors, errors.newest, wait_s)
        operation.expected_at = now + wait_s
        operation.expected_within = now + low_s, now + high_s


def eta_quality(errors: EtaErrors) -> EtaQualityView:
    """How good the estimates were so far."""
    bounds = (*map(str, RATIO_BOUNDS), "+Inf")
    return {
        "estimates": errors.count,
        "mean_error_s": errors.absolute_s / errors.count if errors.count else None,
        "mean_late_s": errors.late_s / errors.count if errors.count else None,
        "slipped": errors.slipped,
        "early": errors.early,
        "late": errors.late,
        "ratios": dict(zip(bounds, accumulate(errors.ratios), strict=True)),
        "ratio_sum": errors.ratio_sum,
    }


def _left_s(state: State, name: OperationId, deployment: Deployment, now: float) -> float:
    return max(0.0, _until_end_s(state, name, deployment, now))


def _until_end_s(state: State, name: OperationId, deployment: Deployment, now: float) -> float:
    """Estimated seconds until an operation ends; negative once that has passed."""
    operation = state.operations[name]
    sent_at = deployment.sent_at(operation)
    began_at = now if sent_at is None else sent_at
    if operation.kind == OperationKind.LOAD:
        whole_s = load_s(state, deployment)
        group = state.group_of(deployment)
        if group is not None and group.switched:
            whole_s *= 1.0 - deployment.estimates.prefetched_part
    elif operation.kind == OperationKind.OFFLOAD:
        whole_s = offload_s(state, deployment)
    else:
        whole_s = deployment.estimates.operation_s(operation.kind, operation.tokens)
    return whole_s - (now - began_at)
