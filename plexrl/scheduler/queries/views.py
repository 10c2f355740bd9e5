"""Views of the core's state: plain values for the wire."""

from collections.abc import Container, Iterable

import msgspec

from plexrl.access import KeyView
from plexrl.ids import BlobRef, DeploymentId, NodeId, OperationId, TenantId
from plexrl.scheduler.accounting.fair_shares import tenant_share
from plexrl.scheduler.accounting.holdings import Holdings
from plexrl.scheduler.accounting.profiler import measured_waiting_part
from plexrl.scheduler.accounting.quotas import limits_of
from plexrl.scheduler.accounting.tenants import key_id, live_jobs_bound
from plexrl.scheduler.accounting.usage import used_gpu_seconds
from plexrl.scheduler.jobs.quoted_jobs import quoted_job
from plexrl.scheduler.operations.failures import failure_view, halting_failure, job_failure
from plexrl.scheduler.operations.held.holding import foreign_memory_view
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.node_pool import speed_of
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.contention.service_level import bound_of
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.queries.explain_operation import explain
from plexrl.scheduler.queries.explain_sharing import why_it_shares
from plexrl.scheduler.rules.lookups import owner_of
from plexrl.scheduler.rules.settings import Settings, Situation
from plexrl.scheduler.rules.switch_cost import load_s, offload_s
from plexrl.scheduler.state.messages.calls import ListOperations
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Group, Job, Node, State
from plexrl.scheduler.state.tenant import ApiKey, Tenant
from plexrl.wire.messages.cluster_views import (
    GroupView,
    NodeView,
    ServiceLevelView,
    TenantView,
    UsageView,
)
from plexrl.wire.messages.views import (
    CheckpointScheduleView,
    DeploymentView,
    JobView,
    LoggedOperationView,
    OperationView,
)
from plexrl.wire.operations import CheckpointSchedule

STARTS_NAMED = 5
"""After more starts of its workers without a completed operation a deployment is named."""


def operation_view(
    cluster: Cluster, operation: Operation, now: float, *, sees_all: bool = False
) -> OperationView:
    """One operation; while it waits, with the reason."""
    deployment = cluster.state.deployment(operation.deployment)
    explanation = explain(cluster, operation, now, sees_all=sees_all)
    return {
        "operation": operation.operation,
        "deployment": operation.deployment,
        "job": deployment.job,
        "tenant": cluster.state.job(deployment.job).tenant,
        "kind": operation.kind.value,
        "state": operation.state.value,
        "seq": operation.seq,
        "submitted_at": operation.submitted_at,
        "started_at": operation.started_at,
        "finished_at": operation.finished_at,
        "deadline_at": operation.deadline_at,
        "compute_s": operation.compute_s,
        "payload": operation.payload,
        "result": operation.result,
        "result_json": operation.result_json,
        "error": operation.error,
        "explanation": None if explanation is None else msgspec.to_builtins(explanation),
    }


def log_view(cluster: Cluster, operation: Operation, now: float) -> LoggedOperationView:
    """One row of the operation log."""
    return {
        **operation_view(cluster, operation, now),
        "index": operation.index,
        "queue_s": operation.queue_s,
        "switch_s": operation.switch_s,
        "transfer_s": operation.transfer_s,
        "payload_bytes": operation.payload_bytes,
        "result_bytes": operation.result_bytes,
        "tokens": operation.tokens,
        "group": operation.group,
        "token": operation.token,
        "internal": operation.internal,
        "interruptions": operation.interruptions,
    }


def deployment_view(state: State, deployment: Deployment) -> DeploymentView:
    """One deployment and its WPG."""
    return {
        "deployment": deployment.deployment,
        "job": deployment.job,
        "tenant": state.job(deployment.job).tenant,
        "kind": deployment.spec.kind,
        "workers": deployment.spec.workers,
        "exclusive": deployment.spec.exclusive,
        "shares_if_scarce": deployment.spec.shares_if_scarce,
        "preemptible": deployment.spec.preemptible,
        "state": deployment.wpg.state.value,
        "residency": deployment.wpg.residency.value,
        "group": deployment.placement.group,
        "groups": list(deployment.placement.groups),
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.node,
                "gpu": rank.gpu,
                "address": deployment.wpg.processes.addresses.get(rank.rank),
            }
            for rank in deployment.placement.ranks
        ],
        "incarnation": deployment.wpg.processes.incarnation,
        "applied_seq": deployment.work.replay.completed_seq,
        "waiting_gradients": deployment.work.waiting_gradients,
        "trainer_step": deployment.work.trainer_step,
        "failure": failure_view(halting_failure(deployment)),
        "durable_seq": deployment.work.replay.durable_seq,
        "state_bytes": deployment.spec.state_bytes,
        "nvme_bytes": deployment.wpg.stored.nvme_bytes,
        "load_s": load_s(state, deployment),
        "offload_s": offload_s(state, deployment),
        "waiting_part": measured_waiting_part(deployment),
        "pending": len(deployment.work.queue),
        "running": [command.kind.value for command in deployment.work.running.values()],
        "spec_json": deployment.spec.spec_json,
        "node_type": deployment.spec.node_type,
        "pace": deployment.spec.pace,
        "checkpoints": _schedule_view(deployment.spec.checkpoints),
    }


def _schedule_view(schedule: CheckpointSchedule | None) -> CheckpointScheduleView | None:
    if schedule is None:
        return None
    return {"every": schedule.every, "keep_last": schedule.keep_last}


def job_view(situation: Situation, job: Job) -> JobView:
    """One job with its deployments."""
    state = situation.state
    view: JobView = {
        "job": job.job,
        "tenant": job.tenant,
        "name": job.name,
        "user": job.user,
        "state": job.state.value,
        "attached": job.attached,
        "reason": job.reason,
        "failure": failure_view(job_failure(state, job)),
        "priority": job.priority,
        "slo": bound_of(situation.settings, job),
        "gpu_seconds": sum(row.gpu_seconds for row in job.usage.values()),
        "controller_timeout_s": job.controller_timeout_s,
        "submitted_at": job.submitted_at,
        "ended_at": job.ended_at,
        "deployments": [deployment_view(state, state.deployment(name)) for name in job.deployments],
    }
    if job.quote is not None:
        view["quoted"] = quoted_job(job, job.quote)
    if job.fork is not None:
        view["fork"] = job.fork
    return view


def list_jobs(situation: Situation, tenant: TenantId | None) -> list[JobView]:
    """All jobs of a tenant, or of all tenants, oldest first."""
    state = situation.state
    return [job_view(situation, job) for job in state.jobs.values() if tenant in (None, job.tenant)]


def live_workers(state: State) -> dict[DeploymentId, int]:
    """The incarnation of each deployment whose workers are all ready."""
    found = (deployment for deployment in state.deployments.values() if deployment.wpg.is_ready)
    return {each.deployment: each.wpg.processes.incarnation for each in found}


def group_view(cluster: Cluster, group: Group) -> GroupView:
    """One node group and the holder of its lock."""
    return {
        "group": group.group,
        "gpus": [{"node": gpu.node, "gpu": gpu.gpu} for gpu in group.gpus],
        "members": list(group.members),
        "fillers": list(group.fillers),
        "shared": group.shared,
        "node_type": group.node_type,
        "is_closed": group.is_closed,
        "load": cluster.capacity.inventory.index.load(group.group),
        "holder": group.holder,
        "token": group.token,
        "phase": _phase(cluster.state, group),
        "switches": group.switches,
        "switch_seconds": group.switch_seconds,
        "sharing": "; ".join(_why_members_share(cluster.queues, group)),
    }


def _why_members_share(queues: Queues, group: Group) -> list[str]:
    """Why each member shares its GPUs for which the scheduler decides that."""
    reasons = {
        name: why_it_shares(queues, queues.state.deployment(name), sees_all=True)
        for name in group.members
    }
    return [f"{name} {why}" for name, why in reasons.items() if why]


def node_view(capacity: Capacity, node: Node, tenant: TenantId | None = None) -> NodeView:
    """One node; for a tenant without its addresses and groups."""
    reserved = sum(
        gpu.node == node.node
        for name in capacity.inventory.groups_on(node.node)
        for gpu in capacity.state.groups[name].gpus
    )
    view: NodeView = {
        "node": node.node,
        "gpus": node.gpus,
        "gpus_reserved": reserved,
        "gpu_memory_bytes": node.gpu_memory_bytes,
        "gpu_kind": node.gpu_kind,
        "host_memory_bytes": node.host_memory_bytes,
        "nvme_bytes": node.nvme_bytes,
        "node_type": node.node_type,
        "speed": speed_of(node),
        "block": node.block,
        "fabric": node.fabric,
        "is_draining": node.is_draining,
        "alive": node.alive,
    }
    if tenant is None:
        view["groups"] = capacity.inventory.groups_on(node.node)
        view["host"] = node.host
        view["statemanager"] = node.statemanager
        groups = [capacity.state.groups[name] for name in view["groups"]]
        names = [name for group in groups for name in (*group.members, *group.fillers)]
        found = foreign_memory_view(capacity.state, names)
        view["foreign_memory"] = [each for each in found if each["node"] == node.node]
    return view


def lost_nodes(state: State) -> list[tuple[NodeId, float]]:
    """The nodes whose agents were lost, and when; without those that drain."""
    return [
        (node.node, node.lost_at)
        for node in state.nodes.values()
        if not node.alive and node.lost_at is not None and not node.is_draining
    ]


def restarting(state: State) -> list[tuple[str, float]]:
    """The deployments whose workers are started again and again without completing an operation,
    each with its text and since when an operation waits."""
    return [
        (
            f"{deployment.deployment} (start {deployment.wpg.processes.starts}): "
            f"{deployment.wpg.processes.ended_because}",
            state.operations[deployment.work.queue[0]].submitted_at,
        )
        for deployment in state.deployments.values()
        if deployment.work.queue and deployment.wpg.processes.starts > STARTS_NAMED
    ]


def expected_nodes(situation: Situation, now: float) -> list[NodeId]:
    """The nodes that are connected, or may be back before their work is placed elsewhere."""
    patience_s = situation.settings.config.node_replace_s
    nodes = situation.state.nodes.values()
    return [node.node for node in nodes if node.lost_at is None or now < node.lost_at + patience_s]


def operation_log(
    cluster: Cluster, tenant: TenantId | None, wanted: ListOperations, now: float
) -> list[LoggedOperationView]:
    """At most `wanted.limit` finished operations after index `wanted.after`, oldest first."""
    state = cluster.state
    rows: list[LoggedOperationView] = []
    names = _requested_deployments(state, tenant, wanted)
    oldest = state.finished_count - len(state.finished) + 1
    # The history is long: skip other deployments by the name alone.
    for index in range(max(wanted.after + 1, oldest), state.finished_count + 1):
        operation = state.operations[state.finished[index]]
        if (
            operation.deployment in names
            and wanted.kind in (None, operation.kind.value)
            and owner_of(state, operation) is not None
        ):
            rows.append(log_view(cluster, operation, now))
            if len(rows) == wanted.limit:
                break
    return rows


def _requested_deployments(
    state: State, tenant: TenantId | None, wanted: ListOperations
) -> Container[DeploymentId]:
    names: Iterable[DeploymentId]
    if wanted.deployment is not None:
        names = [wanted.deployment] if wanted.deployment in state.deployments else []
    elif wanted.job is not None:
        job = state.jobs.get(wanted.job)
        names = [] if job is None else [*job.deployments, *job.ended_deployments]
    elif tenant is None:
        return state.deployments
    else:
        owned = (job for job in state.jobs.values() if job.tenant == tenant)
        names = [name for job in owned for name in (*job.deployments, *job.ended_deployments)]
    owners = ((name, state.jobs[state.deployments[name].job]) for name in names)
    return {
        name
        for name, job in owners
        if tenant in (None, job.tenant) and wanted.job in (None, job.job)
    }


def ended_since(state: State, count: int) -> tuple[int, list[OperationId] | None]:
    """(number of operations ended so far, names of those after the first `count` in order); no
    names if some of them have left the history."""
    ended = state.finished_count
    if ended - count > len(state.finished):
        return ended, None
    return ended, [state.finished[index] for index in range(count + 1, ended + 1)]


def unreferenced_payloads(state: State, blobs: Iterable[BlobRef]) -> list[BlobRef]:
    """The payloads, and partial results, that neither an unfinished operation nor a recovery
    needs."""
    operations = state.operations.values()
    kept = [
        operation for operation in operations if operation.is_logged or not operation.state.is_final
    ]
    needed = {ref for each in kept for ref in (each.payload, each.partial)}
    return [blob for blob in blobs if blob not in needed]


def service_levels(situation: Situation) -> list[ServiceLevelView]:
    """The bound and the measured waiting of each live job, oldest first."""
    state = situation.state
    found: list[ServiceLevelView] = []
    for job in state.jobs.values():
        if job.state.is_final:
            continue
        parts = [measured_waiting_part(state.deployment(name)) for name in job.deployments]
        found.append(
            {
                "job": job.job,
                "tenant": job.tenant,
                "name": job.name,
                "slo": bound_of(situation.settings, job),
                "is_promised": job.slo is not None,
                "waiting_part": max((part for part in parts if part is not None), default=None),
            }
        )
    return found


def usage_view(state: State, tenant: TenantId | None) -> list[UsageView]:
    """Usage by job and kind of operation, oldest job first."""
    return [
        {
            "tenant": job.tenant,
            "job": job.job,
            "name": job.name,
            "user": job.user,
            "kind": kind.value,
            "operations": row.operations,
            "failed": row.failed,
            "tokens": row.tokens,
            "gpu_seconds": row.gpu_seconds,
            "paced": any(state.deployments[deployment].spec.pace for deployment in job.deployments),
        }
        for job in state.jobs.values()
        if tenant in (None, job.tenant)
        for kind, row in sorted(job.usage.items())
    ]


def key_view(digest: str, key: ApiKey) -> KeyView:
    """One API key of a tenant."""
    return {
        "key": key_id(digest),
        "created_at": key.created_at or None,
        "role": key.role.value,
        "user": key.user,
        "name": key.name,
        "scope": key.scope.value,
        "expires_at": key.expires_at or None,
    }


def tenant_view(holdings: Holdings, settings: Settings, tenant: Tenant, now: float) -> TenantView:
    """One tenant: limits, holdings and usage."""
    gpus, jobs = holdings.of(tenant.tenant)
    return {
        "tenant": tenant.tenant,
        "is_operator": tenant.is_operator,
        "keys": [key_view(digest, key) for digest, key in tenant.keys.items()],
        **limits_of(tenant),
        "gpus_held": gpus,
        "jobs_running": jobs,
        "live_jobs": holdings.live_jobs.get(tenant.tenant, 0),
        "live_jobs_bound": live_jobs_bound(settings, tenant),
        "gpu_seconds": used_gpu_seconds(holdings, tenant.tenant, now),
        "share": tenant_share(holdings, tenant.tenant, now),
    }


def _phase(state: State, group: Group) -> str:
    if group.holder is None:
        return "idle"
    holder = state.deployment(group.holder)
    if holder.wpg.moving is not None:
        return holder.wpg.moving.kind.value
    return "run" if holder.work.running else "hold"
