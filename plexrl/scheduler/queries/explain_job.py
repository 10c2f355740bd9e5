"""Explains a job: what it waits for and until when, where it is placed and why."""

import msgspec

from plexrl.scheduler.accounting.profiler import measured_waiting_part
from plexrl.scheduler.operations.failures import earlier_failure, job_failure
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.topology import common_part, natural_order
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.contention.service_level import bound_of
from plexrl.scheduler.queries.eta import eta_quality
from plexrl.scheduler.queries.explain_holders import holders
from plexrl.scheduler.queries.explain_operation import explain
from plexrl.scheduler.queries.explain_placement import attempts, near_groups, why_no_gpus
from plexrl.scheduler.queries.explain_sharing import why_it_shares
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.deployment.placement import PlacementRecord
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Job
from plexrl.wire.messages.views import (
    ExplainedJobView,
    ExplanationView,
    MemoryView,
    PlacedDeploymentView,
    PlacementView,
    WaitingOperationView,
)

BLOCKS_MAX = 4
"""Maximum number of named blocks for each deployment."""
OPERATIONS_MAX = 20
"""Maximum number of explained operations for each deployment, next ones first."""


def explain_job(cluster: Cluster, job: Job, now: float, *, sees_all: bool) -> ExplainedJobView:
    """Why `job` waits or runs as it does. `sees_all`: for an operator, who may see which other
    tenants' jobs hold the GPUs."""
    deployments = [cluster.state.deployment(name) for name in job.deployments]
    return {
        "job": job.job,
        "tenant": job.tenant,
        "name": job.name,
        "state": job.state.value,
        "slo": bound_of(cluster.settings, job),
        "summary": _summary(cluster, job, deployments, now, sees_all),
        "deployments": [
            _deployment(cluster, deployment, now, sees_all) for deployment in deployments
        ],
        "operations": [
            row
            for deployment in deployments
            for row in _operations(cluster, deployment, now, sees_all)
        ],
        "holders": holders(cluster, job, now, sees_all=sees_all),
        "eta_quality": eta_quality(cluster.state.eta_errors),
    }


def _summary(
    cluster: Cluster, job: Job, deployments: list[Deployment], now: float, sees_all: bool
) -> str:
    if job.state.is_final:
        return f"it has ended: {job.reason}" if job.reason else "it has ended"
    if not deployments:
        return "it has no deployments yet"
    failure = job_failure(cluster.state, job)
    if failure is not None:
        return f"its controller has not acknowledged a failure: {earlier_failure(failure).message}"
    for deployment in deployments:
        if deployment.wpg.state == WpgState.WAITING:
            reason, _, _ = why_no_gpus(cluster, deployment, now, sees_all=sees_all)
            return f"{deployment.deployment} waits for GPUs: {reason}"
    for deployment in deployments:
        for row in _operations(cluster, deployment, now, sees_all, most=1):
            if row["rule"] != "running":
                return f"{row['operation']} waits: {row['reason']}"
    if any(deployment.work.running for deployment in deployments):
        return "it runs"
    return "it waits for its controller's next operation"


def _deployment(
    cluster: Cluster, deployment: Deployment, now: float, sees_all: bool
) -> PlacedDeploymentView:
    record = deployment.placement.record
    trace = deployment.demand.trace
    view: PlacedDeploymentView = {
        "deployment": deployment.deployment,
        "state": deployment.wpg.state.value,
        "group": deployment.placement.group,
        "groups": list(deployment.placement.groups),
        "nodes": list(deployment.placement.nodes),
        "topology": _topology(cluster, deployment),
        "placement": None if record is None else _placement(record, sees_all),
        "moves": deployment.wpg.moves.count,
        "moved_because": deployment.wpg.moves.last_reason,
        "waiting_part": measured_waiting_part(deployment),
        "profile": None,
        "attempts": [],
        "near": [],
        "memory": _memory_view(cluster.capacity, deployment),
        "pace": deployment.spec.pace,
        "sharing": why_it_shares(cluster.queues, deployment, sees_all=sees_all),
    }
    if trace is not None and (sees_all or not deployment.demand.has_prior):
        # A prior is the demand of other tenants.
        view["profile"] = {
            "period_s": trace.period_s,
            "busy_s": trace.busy_s,
            "duty": trace.duty,
            "jitter_s": trace.jitter_s,
            "segments": msgspec.to_builtins(trace.segments),
            "cycles": trace.cycles,
        }
    if deployment.wpg.state == WpgState.WAITING:
        view["attempts"] = attempts(cluster, deployment, now, searches=True)
    may_see = sees_all or not deployment.demand.has_prior
    if (
        deployment.spec.shares
        and trace is not None
        and may_see
        and deployment.wpg.state != WpgState.STOPPED
    ):
        view["near"] = near_groups(cluster, deployment, now, sees_all=sees_all)
    return view


def _placement(record: PlacementRecord, sees_all: bool) -> PlacementView:
    """How it was placed. What follows from the demand of others is for operators."""
    view: PlacementView = msgspec.to_builtins(record)
    if record.by_prior and not sees_all:
        view["shift_s"] = view["overlap_s"] = view["interference_s"] = view["contention"] = None
    return view


def _topology(situation: Situation, deployment: Deployment) -> str:
    if not deployment.placement.nodes:
        return ""
    nodes = [situation.state.nodes[name] for name in deployment.placement.nodes]
    blocks = sorted({node.block for node in nodes}, key=natural_order)
    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    if len(blocks) == 1:
        return f"{count} in {blocks[0]}" if blocks[0] else f"{count}, without a block"
    names = ", ".join(block or "no block" for block in blocks[:BLOCKS_MAX])
    names += ", ..." if len(blocks) > BLOCKS_MAX else ""
    part = common_part(blocks)
    return f"{count} in {len(blocks)} blocks of {part or 'several parts'} ({names})"


def _operations(
    cluster: Cluster,
    deployment: Deployment,
    now: float,
    sees_all: bool,
    most: int = OPERATIONS_MAX,
) -> list[WaitingOperationView]:
    rows: list[WaitingOperationView] = []
    for name in [*deployment.work.running, *deployment.work.queue][:most]:
        operation = cluster.state.operations[name]
        found = explain(cluster, operation, now, sees_all=sees_all)
        if found is not None:
            explanation: ExplanationView = msgspec.to_builtins(found)
            rows.append(
                {
                    "operation": name,
                    "deployment": deployment.deployment,
                    "kind": operation.kind.value,
                    "waited_s": now - operation.submitted_at,
                    **explanation,
                }
            )
    return rows


def _memory_view(capacity: Capacity, deployment: Deployment) -> MemoryView | None:
    """The sum of a deployment's memory on each GPU; None: its need is unknown."""
    memory, group = deployment.demand.memory, capacity.state.group_of(deployment)
    if memory is None:
        return None
    others = 0
    if group is not None:
        others = capacity.inventory.device_bytes(group)[0] - memory.kept_bytes
    return {
        "terms": [
            {"name": term.name, "nbytes": term.nbytes, "stays": term.stays} for term in memory.terms
        ],
        "need_bytes": memory.need_bytes,
        "is_measured": memory.is_measured,
        "others_keep_bytes": others,
        "gpu_memory_bytes": None if group is None else group.gpu_memory_bytes,
        "gpu_kind": "" if group is None else group.gpu_kind,
    }
