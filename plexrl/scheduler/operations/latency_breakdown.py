"""Latency breakdown: how an operation spent its time.

An operation waits in its queue and for context switches, and then runs: the router transfers its
payload and result, and the workers compute. The rest of its time is overhead of the control plane.
Where its start was estimated, the wait is compared with the estimate.
"""

from bisect import bisect_left

from plexrl.scheduler.state.demand.wait_intervals import CLUSTER_ERRORS, GROUP_ERRORS, keep
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import RATIO_BOUNDS, Deployment, Group, State


def note_start(deployment: Deployment, operation: Operation, now: float) -> None:
    """Split the waiting time of an operation that starts now."""
    submitted_at = operation.submitted_at
    switch_s = deployment.demand.switch_times.seconds_since(submitted_at)
    operation.switch_s = switch_s
    queue_s = now - submitted_at - switch_s
    operation.queue_s = queue_s if queue_s > 0.0 else 0.0


def compare_start(state: State, group: Group, operation: Operation, now: float) -> None:
    """Record the error of the estimated start of an operation, which starts now."""
    assert operation.expected_at is not None
    errors = state.eta_errors
    late_s = now - operation.expected_at
    errors.count += 1
    errors.absolute_s += abs(late_s)
    errors.late_s += max(0.0, late_s)
    said_s = operation.expected_at - operation.submitted_at
    errors.slipped += late_s > max(1.0, said_s)
    if operation.expected_within is not None:
        errors.early += now < operation.expected_within[0]
        errors.late += now > operation.expected_within[1]
    ratio = (said_s + late_s + 1.0) / (said_s + 1.0)
    errors.ratios[bisect_left(RATIO_BOUNDS, ratio)] += 1
    errors.ratio_sum += ratio
    keep(group.wait_errors, late_s, GROUP_ERRORS)
    keep(errors.newest, late_s, CLUSTER_ERRORS)
    # The estimate is for the first start; an interrupted operation starts again.
    operation.expected_at = operation.expected_within = None
