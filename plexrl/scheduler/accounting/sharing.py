"""GPU time that sharing saved, by job: time of separate groups minus time of the shared ones.

    reserved = sum over the job's deployments of workers * time on a group
    waited   = the job's GPUs * time that a deployment of it waited for other members of its group
    isolated = reserved - waited
    held     = sum over its deployments of workers * integral of dt / members of the group then
    saved    = isolated - held

`isolated` is the GPU time that the job would have reserved with a group of its own for each of its
deployments: without waiting it would have ended earlier, with all its GPUs, its rollouts' included.
A job that does other work while it waits is not prolonged by the whole wait, so `saved` is a lower
bound. Each member gets an equal part of its group's time, so `held`, summed over all jobs, is the
GPU time of all groups. A job that shares with no other saves 0. The value is negative if waits and
switches cost more than sharing saved.

Groups are settled when a member joins or leaves, waits when they end. `sharing_view` adds the time
since then.
"""

from dataclasses import dataclass

from plexrl.ids import JobId, TenantId
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Group, Job, State
from plexrl.wire.messages.cluster_views import SharingView


def settle_group(state: State, group: Group, now: float) -> None:
    """Count the group's time since the last call; call it before the members change."""
    for job, reserved, held in _parts_since(state, group, now):
        sharing = state.jobs[job].sharing
        sharing.reserved_gpu_seconds += reserved
        sharing.held_gpu_seconds += held
    group.settled_at = now


def note_wait(state: State, deployment: Deployment, now: float) -> None:
    """Count the wait of `deployment` for other members of its groups up to now, when it starts to
    run or leaves. Overlapping waits of one job count once."""
    span = _wait(state, deployment, now)
    if span is None:
        return
    job = state.jobs[deployment.job]
    sharing = job.sharing
    sharing.waited_gpu_seconds += _fresh_s(job, span) * _gpus(state, job)
    if span.since < sharing.wait_until:
        sharing.wait_since = min(span.since, sharing.wait_since)
        sharing.wait_until = max(span.until, sharing.wait_until)
    else:
        sharing.wait_since, sharing.wait_until = span.since, span.until


def sharing_view(state: State, tenant: TenantId | None, now: float) -> list[SharingView]:
    """One row for each job that has had GPUs, of a tenant or of all, oldest job first."""
    open_parts: dict[JobId, tuple[float, float]] = {}
    open_waits: dict[JobId, float] = {}
    for group in state.groups.values():
        for name, reserved, held in _parts_since(state, group, now):
            before = open_parts.get(name, (0.0, 0.0))
            open_parts[name] = before[0] + reserved, before[1] + held
        for member in group.members:
            deployment = state.deployments[member]
            span = _wait(state, deployment, now) if deployment.work.queue else None
            if span is not None:
                job = state.jobs[deployment.job]
                waited = _fresh_s(job, span) * _gpus(state, job)
                # All open waits end now: the longest one covers the others.
                open_waits[job.job] = max(open_waits.get(job.job, 0.0), waited)
    rows: list[SharingView] = []
    for job in state.jobs.values():
        if tenant not in (None, job.tenant):
            continue
        more_reserved, more_held = open_parts.get(job.job, (0.0, 0.0))
        reserved = job.sharing.reserved_gpu_seconds + more_reserved
        held = job.sharing.held_gpu_seconds + more_held
        if reserved > 0.0:
            waited = job.sharing.waited_gpu_seconds + open_waits.get(job.job, 0.0)
            rows.append(_row(job, reserved, waited, held))
    return rows


@dataclass(frozen=True, slots=True)
class _Span:
    since: float
    until: float


def _row(job: Job, reserved: float, waited: float, held: float) -> SharingView:
    isolated = reserved - waited
    return {
        "tenant": job.tenant,
        "job": job.job,
        "name": job.name,
        "user": job.user,
        "reserved_gpu_seconds": reserved,
        "waited_gpu_seconds": waited,
        "isolated_gpu_seconds": isolated,
        "held_gpu_seconds": held,
        "saved_gpu_seconds": isolated - held,
    }


def _parts_since(state: State, group: Group, now: float) -> list[tuple[JobId, float, float]]:
    """(job, reserved, held) of each member for the time since the group was settled."""
    since = group.settled_at
    if since is None or now <= since:
        return []
    gpu_seconds = (now - since) * len(group.gpus)
    part = gpu_seconds / max(1, len(group.members))
    return [(state.deployments[name].job, gpu_seconds, part) for name in group.members]


def _wait(state: State, deployment: Deployment, now: float) -> _Span | None:
    """The time span in which `deployment` has waited for other members."""
    since = deployment.demand.burst.wants_since
    if since is None or now <= since or deployment.wpg.state != WpgState.READY:
        return None
    switched_at = deployment.demand.switch_times.ended_at
    if deployment.wpg.residency == Residency.DEVICE and (
        switched_at is None or switched_at <= since
    ):
        # It had the group all the time, and waited for its own work.
        return None
    since = max(since, deployment.wpg.processes.ready_at)
    groups = state.groups_of(deployment)
    is_shared = any(len(group.members) > 1 for group in groups)
    until = now if is_shared else max([group.alone_since for group in groups])
    return _Span(since, until) if until > since else None


def _fresh_s(job: Job, span: _Span) -> float:
    """Seconds of `span` that were not counted before."""
    sharing = job.sharing
    if span.since >= sharing.wait_until:
        return span.until - span.since
    after_s = max(0.0, span.until - sharing.wait_until)
    return after_s + max(0.0, min(span.until, sharing.wait_since) - span.since)


def _gpus(state: State, job: Job) -> int:
    """GPUs of the job's deployments that have some."""
    deployments, gpus = state.deployments, 0
    for name in job.deployments:
        deployment = deployments[name]
        if deployment.has_gpus:
            gpus += deployment.spec.workers
    return gpus
