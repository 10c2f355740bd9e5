"""Latency breakdown: how an operation spent its time.

An operation waits in its queue and for context switches, and then runs: the router transfers its
payload and result, and the workers compute. The rest of its time is overhead of the control plane.
"""

from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment


def note_start(deployment: Deployment, operation: Operation, now: float) -> None:
    """Split the waiting time of an operation that starts now."""
    submitted_at = operation.submitted_at
    switch_s = deployment.switch_times.seconds_since(submitted_at)
    operation.switch_s = switch_s
    queue_s = now - submitted_at - switch_s
    operation.queue_s = queue_s if queue_s > 0.0 else 0.0
