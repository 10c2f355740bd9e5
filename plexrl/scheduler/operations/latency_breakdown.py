"""Where an operation's time went, as the scheduler can tell and others report.

An operation waits, in its queue and for context switches of its group, and then runs: its payload
and result travel, and the workers compute. What a run took beyond that is the control plane's.
"""

from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment


def switch_began(deployment: Deployment, now: float) -> None:
    """GPUs are being cleared for the deployment, or its state is being loaded."""
    if deployment.switch_began_at is None or deployment.switch_ended_at is not None:
        deployment.switch_began_at = now
        deployment.switch_ended_at = None


def switch_ended(deployment: Deployment, now: float) -> None:
    """Its state is on the GPUs, or the switch was called off."""
    if deployment.switch_began_at is not None and deployment.switch_ended_at is None:
        deployment.switch_ended_at = now


def note_start(deployment: Deployment, operation: Operation, now: float) -> None:
    """Split the wait of an operation that starts now."""
    began_at, ended_at = deployment.switch_began_at, deployment.switch_ended_at
    submitted_at = operation.submitted_at
    switch_s = 0.0
    if began_at is not None and ended_at is not None:
        since = submitted_at if submitted_at > began_at else began_at
        if ended_at > since:
            switch_s = ended_at - since
    operation.switch_s = switch_s
    queue_s = now - submitted_at - switch_s
    operation.queue_s = queue_s if queue_s > 0.0 else 0.0
