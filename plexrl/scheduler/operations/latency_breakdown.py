"""Where an operation's time went, as the scheduler can tell and others report.

An operation waits, in its queue and for context switches of its group, and then runs: its payload
and result travel, and the workers compute. What a run took beyond that is the control plane's.
"""

from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment


def note_start(deployment: Deployment, operation: Operation, now: float) -> None:
    """Split the wait of an operation that starts now."""
    submitted_at = operation.submitted_at
    switch_s = deployment.switch_times.seconds_since(submitted_at)
    operation.switch_s = switch_s
    queue_s = now - submitted_at - switch_s
    operation.queue_s = queue_s if queue_s > 0.0 else 0.0
