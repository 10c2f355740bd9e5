"""What tenants used: GPU-seconds by job and kind of operation, exact to the journal (PlexRL §7.2).

A run is billed for the time it held its group's GPUs, from its start to the report of its end. A
context switch is billed to the job that gets the group: the load of its own state and the offload
of whoever was there before, in anticipation too, where that job was only expected. The offload for
a drain is the drained job's own. Of what a fault made necessary, a run cut off and a replay are
nobody's; the load of the state into new workers is their job's.
Operations that run side by side share the time they overlap in equal parts.
"""

from typing import Final

from plexrl.scheduler.core.limits import TOTAL_MAX
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, State, UsageRow
from plexrl.wire.operations import OperationState

_FAILED: Final = OperationState.FAILED
"""Named once: to reach a member of an enumeration through its class takes longer than a call."""


def meter(state: State, deployment: Deployment, now: float) -> None:
    """Share the GPU time since the last call among the runs in flight."""
    since = deployment.metered_at
    deployment.metered_at = now
    moving, running = deployment.moving, deployment.running
    if since is None or now <= since or (moving is None and not running):
        return
    held = (now - since) * deployment.workers
    if moving is not None:
        part = held / (1 + len(running))
        state.operations[moving.operation].gpu_seconds += part
        held -= part
    for name in running:
        state.operations[name].gpu_seconds += held / len(running)


def meter_run(state: State, deployment: Deployment, operation: Operation, now: float) -> None:
    """As `meter`, for a deployment that `operation` is in flight on: nearly always alone."""
    others = len(deployment.running) - (deployment.moving is None)
    if others:
        meter(state, deployment, now)
        return
    since = deployment.metered_at
    deployment.metered_at = now
    if since is not None and now > since:
        operation.gpu_seconds += (now - since) * deployment.workers


def bill(state: State, deployment: Deployment, operation: Operation) -> None:
    """Enter a run that has come to its end; replays are entered nowhere."""
    cause, gpu_seconds = operation.caused_by, operation.gpu_seconds
    causer = deployment if cause is None else state.deployments.get(cause)
    if causer is None:
        # Its job has ended and is forgotten; its tenant pays all the same.
        payer_tenant = operation.paid_by
    else:
        payer = state.jobs[causer.job]
        payer_tenant = payer.tenant
        row = payer.usage.get(operation.kind)
        if row is None:
            row = payer.usage[operation.kind] = UsageRow()
        row.operations += 1
        if operation.state is _FAILED:
            row.failed += 1
        row.gpu_seconds += gpu_seconds
        # A sum that left 64 bits could not be written down any more.
        row.tokens = min(row.tokens + operation.tokens, TOTAL_MAX)
    tenant = None if payer_tenant is None else state.tenants.get(payer_tenant)
    if tenant is not None:
        tenant.gpu_seconds += gpu_seconds


def count_failure(state: State, deployment: Deployment, operation: Operation) -> None:
    """Enter an operation that failed before it began; it used nothing."""
    usage = state.jobs[deployment.job].usage
    row = usage.get(operation.kind)
    if row is None:
        row = usage[operation.kind] = UsageRow()
    row.operations += 1
    row.failed += 1
