"""What the core shows of itself: plain values for the wire."""

from typing import Any

import msgspec

from plexrl.scheduler.context import Context
from plexrl.scheduler.explain import explain
from plexrl.scheduler.state import Deployment, Group, Job, Node, Operation

View = dict[str, Any]


def operation_view(context: Context, operation: Operation, now: float) -> View:
    """One operation, with the reason it waits for while it does."""
    deployment = context.deployment(operation.deployment)
    explanation = explain(context, operation, now)
    return {
        "operation": operation.operation,
        "deployment": operation.deployment,
        "job": deployment.job,
        "tenant": context.job(deployment.job).tenant,
        "kind": operation.kind.value,
        "state": operation.state.value,
        "seq": operation.seq,
        "submitted_at": operation.submitted_at,
        "started_at": operation.started_at,
        "finished_at": operation.finished_at,
        "compute_s": operation.compute_s,
        "result": operation.result,
        "result_json": operation.result_json,
        "error": None
        if operation.error_json is None
        else msgspec.json.decode(operation.error_json),
        "explanation": None if explanation is None else msgspec.to_builtins(explanation),
    }


def log_view(context: Context, operation: Operation, now: float) -> View:
    """One row of the operation log."""
    return {
        **operation_view(context, operation, now),
        "index": operation.index,
        "group": operation.group,
        "token": operation.token,
        "internal": operation.internal,
    }


def deployment_view(context: Context, deployment: Deployment) -> View:
    """One deployment and its WPG."""
    del context
    return {
        "deployment": deployment.deployment,
        "job": deployment.job,
        "kind": deployment.kind,
        "workers": deployment.workers,
        "exclusive": deployment.exclusive,
        "state": deployment.state.value,
        "residency": deployment.residency.value,
        "group": deployment.group,
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.node,
                "gpu": rank.gpu,
                "address": deployment.addresses.get(rank.rank),
            }
            for rank in deployment.ranks
        ],
        "incarnation": deployment.incarnation,
        "applied_seq": deployment.completed_seq,
        "durable_seq": deployment.durable_seq,
        "state_bytes": deployment.state_bytes,
        "pending": len(deployment.queue),
        "running": [command.kind.value for command in deployment.running.values()],
        "spec_json": deployment.spec_json,
    }


def job_view(context: Context, job: Job) -> View:
    """One job with its deployments."""
    return {
        "job": job.job,
        "tenant": job.tenant,
        "name": job.name,
        "state": job.state.value,
        "attached": job.attached,
        "reason": job.reason,
        "submitted_at": job.submitted_at,
        "ended_at": job.ended_at,
        "deployments": [
            deployment_view(context, context.deployment(name)) for name in job.deployments
        ],
    }


def group_view(context: Context, group: Group) -> View:
    """One node group and who has its lock."""
    return {
        "group": group.group,
        "gpus": [{"node": gpu.node, "gpu": gpu.gpu} for gpu in group.gpus],
        "members": list(group.members),
        "shared": group.shared,
        "holder": group.holder,
        "token": group.token,
        "phase": _phase(context, group),
        "switches": group.switches,
        "switch_seconds": group.switch_seconds,
    }


def node_view(context: Context, node: Node) -> View:
    """One node."""
    reserved = sum(
        gpu.node == node.node for group in context.state.groups.values() for gpu in group.gpus
    )
    return {
        "node": node.node,
        "gpus": node.gpus,
        "gpus_reserved": reserved,
        "gpu_memory_bytes": node.gpu_memory_bytes,
        "host_memory_bytes": node.host_memory_bytes,
        "alive": node.alive,
        "statemanager": node.statemanager,
    }


def _phase(context: Context, group: Group) -> str:
    if group.holder is None:
        return "idle"
    holder = context.deployment(group.holder)
    if holder.moving is not None:
        return holder.moving.kind.value
    return "run" if holder.running else "hold"
