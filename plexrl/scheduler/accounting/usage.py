"""Use of tenants: GPU-seconds by job and kind of operation, exact to the journal (PlexRL §7.2).

A run is billed for the time it held its group's GPUs, from its start to its end, when it ends:
whether it is reported as finished, failed or interrupted, or is cut off by the end of its job or
deployment or by another layout. What happens to its operation later, in the queue, changes nothing.
A context switch is billed to the job that gets the group: the load of its state, and the offload of
the former holder, also if that job was only expected. The offload for a drain is billed to the
drained job. Billed to no job is what the cluster made worthless (`discard`): runs that a lost
worker or a condition of the cluster cut off, moves that failed, and replays. The load of the state
into new workers is billed to their job. Operations that run at the same time share that time in
equal parts. A budget counts runs from their start (`used_gpu_seconds`).
"""

import math
from typing import Final

from plexrl.ids import TenantId
from plexrl.scheduler.accounting.holdings import Holdings
from plexrl.scheduler.rules.limits import TOTAL_MAX
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Job, State, UsageRow
from plexrl.wire.operations import OperationKind, OperationState

_OFFLOADED: Final = Residency.OFFLOADED
_FAILED: Final = OperationState.FAILED
"""A module constant: access to a member through its enumeration is slow."""


def meter(state: State, deployment: Deployment, now: float) -> None:
    """Divide the GPU time since the last call among the runs in flight."""
    since = deployment.demand.meter(now)
    moving, running = deployment.wpg.moving, deployment.work.running
    if since is None or now <= since or (moving is None and not running):
        return
    if moving is None and deployment.wpg.residency is _OFFLOADED:
        # What runs on the stored state holds no GPU.
        return
    held = (now - since) * deployment.spec.workers
    if moving is not None:
        part = held / (1 + len(running))
        state.operations[moving.operation].gpu_seconds += part
        held -= part
    for name in running:
        state.operations[name].gpu_seconds += held / len(running)


def meter_run(state: State, deployment: Deployment, operation: Operation, now: float) -> None:
    """As `meter`, for a deployment that runs `operation`, nearly always alone."""
    others = len(deployment.work.running) - (deployment.wpg.moving is None)
    if others:
        meter(state, deployment, now)
        return
    since = deployment.demand.meter(now)
    holds_gpu = deployment.wpg.moving is not None or deployment.wpg.residency is not _OFFLOADED
    if since is not None and now > since and holds_gpu:
        operation.gpu_seconds += (now - since) * deployment.spec.workers


def bill(state: State, deployment: Deployment, operation: Operation) -> None:
    """Bill the last run of an operation that has ended, and count the operation."""
    row = bill_run(state, deployment, operation)
    if row is None:
        return
    row.operations += 1
    if operation.state is _FAILED:
        row.failed += 1
    if operation.tokens:
        # A snapshot cannot hold a sum above 64 bits.
        row.tokens = min(row.tokens + operation.tokens, TOTAL_MAX)


def bill_run(state: State, deployment: Deployment, operation: Operation) -> UsageRow | None:
    """Bill a run that has ended; another run may continue the operation. Returns the row of the job
    that pays; None: the job was dropped, and its tenant alone pays."""
    gpu_seconds, operation.gpu_seconds = operation.gpu_seconds, 0.0
    caused = operation.caused_by is not None
    job: Job | None = _causer(state, operation) if caused else state.jobs[deployment.job]
    tenant = state.tenants.get(_payer(job, operation) if job is None else job.tenant)
    if tenant is not None:
        tenant.gpu_seconds += gpu_seconds
    if job is None:
        return None
    row = job.usage.get(operation.kind)
    if row is None:
        row = job.usage[operation.kind] = UsageRow()
    row.gpu_seconds += gpu_seconds
    return row


def bill_cut_off(state: State, deployment: Deployment, now: float) -> None:
    """Bill what is in flight, which the deployment's controller cuts off: that is no fault."""
    meter(state, deployment, now)
    moving = [] if deployment.wpg.moving is None else [deployment.wpg.moving]
    for command in (*deployment.work.running.values(), *moving):
        if not command.replay:
            bill_run(state, deployment, state.operations[command.operation])


def discard(operation: Operation) -> None:
    """Bill a run to nobody."""
    operation.gpu_seconds = 0.0


def count_failure(state: State, deployment: Deployment, operation: Operation) -> None:
    """Count an operation that failed before it started."""
    row = _row(state.jobs[deployment.job], operation.kind)
    row.operations += 1
    row.failed += 1


def used_gpu_seconds(holdings: Holdings, name: TenantId, now: float) -> float:
    """GPU time that the tenant has used: what is billed, and its runs under way. A switch under way
    for a deployment that has just left the group is counted when it ends.

    The time is linear in the tenant's deployments that are on groups.
    """
    state = holdings.state
    tenant = state.tenants.get(name)
    placed = [state.deployments[each] for each in holdings.placed(name)]
    groups = dict.fromkeys([group for each in placed for group in each.placement.groups])
    holders = dict.fromkeys([state.groups[group].holder for group in groups])
    under_way = []
    for holder in holders:
        if holder is not None:
            under_way += _under_way(state, state.deployments[holder], name, now)
    # The sum must not depend on the order of the groups, which a snapshot does not keep.
    return (0.0 if tenant is None else tenant.gpu_seconds) + math.fsum(under_way)


def _under_way(state: State, holder: Deployment, name: TenantId, now: float) -> list[float]:
    """GPU time so far of each run of the holder that the tenant pays."""
    commands = [command for command in holder.work.running.values() if not command.replay]
    count = len(holder.work.running)
    if holder.wpg.moving is not None:
        commands.append(holder.wpg.moving)
        count += 1
    since = now if holder.demand.metered_at is None else holder.demand.metered_at
    open_s = max(0.0, now - since) * holder.spec.workers
    found = []
    for command in commands:
        operation = state.operations[command.operation]
        caused = operation.caused_by is not None
        job = _causer(state, operation) if caused else state.jobs[holder.job]
        if _payer(job, operation) == name:
            found.append(operation.gpu_seconds + open_s / count)
    return found


def _causer(state: State, operation: Operation) -> Job | None:
    """The job for which a move of another one's state was made; None: it was dropped, even if
    another job has the name."""
    assert operation.caused_by is not None
    causer = state.deployments.get(operation.caused_by)
    if causer is None or operation.submitted_at < causer.created_at:
        return None
    return state.jobs[causer.job]


def _payer(job: Job | None, operation: Operation) -> TenantId:
    if job is not None:
        return job.tenant
    assert operation.paid_by is not None, f"nobody pays {operation.operation}"
    return operation.paid_by


def _row(job: Job, kind: OperationKind) -> UsageRow:
    row = job.usage.get(kind)
    if row is None:
        row = job.usage[kind] = UsageRow()
    return row
