"""Use of tenants: GPU-seconds by job and kind of operation, exact to the journal (PlexRL §7.2).

A run is billed for the time it held its group's GPUs, from its start to the report of its end. A
context switch is billed to the job that gets the group: the load of its state, and the offload of
the former holder, also if that job was only expected. The offload for a drain is billed to the
drained job. After a fault, interrupted runs and replays are billed to no job; the load of the state
into new workers is billed to their job. Operations that run at the same time share that time in
equal parts.
"""

from typing import Final

from plexrl.scheduler.core.limits import TOTAL_MAX
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, State, UsageRow
from plexrl.wire.operations import OperationState

_FAILED: Final = OperationState.FAILED
"""A module constant: access to a member through its enumeration is slow."""


def meter(state: State, deployment: Deployment, now: float) -> None:
    """Divide the GPU time since the last call among the runs in flight."""
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
    """As `meter`, for a deployment that runs `operation`, nearly always alone."""
    others = len(deployment.running) - (deployment.moving is None)
    if others:
        meter(state, deployment, now)
        return
    since = deployment.metered_at
    deployment.metered_at = now
    if since is not None and now > since:
        operation.gpu_seconds += (now - since) * deployment.workers


def bill(state: State, deployment: Deployment, operation: Operation) -> None:
    """Bill a run that has ended; replays are not billed."""
    cause, gpu_seconds = operation.caused_by, operation.gpu_seconds
    causer = deployment if cause is None else state.deployments.get(cause)
    if causer is None:
        # The job was dropped; its tenant is billed.
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
        if operation.tokens:
            # A snapshot cannot hold a sum above 64 bits.
            row.tokens = min(row.tokens + operation.tokens, TOTAL_MAX)
    tenant = None if payer_tenant is None else state.tenants.get(payer_tenant)
    if tenant is not None:
        tenant.gpu_seconds += gpu_seconds


def count_failure(state: State, deployment: Deployment, operation: Operation) -> None:
    """Count an operation that failed before it started."""
    usage = state.jobs[deployment.job].usage
    row = usage.get(operation.kind)
    if row is None:
        row = usage[operation.kind] = UsageRow()
    row.operations += 1
    row.failed += 1
