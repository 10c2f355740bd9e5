"""Whether GPUs are scarce: another eligible deployment waits for more GPUs than would remain."""

from typing import TYPE_CHECKING

from plexrl.scheduler.accounting.quotas import over_quota
from plexrl.scheduler.placement.capacity.needs import node_types_compatible
from plexrl.scheduler.placement.fit.feasibility import is_possible

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from plexrl.scheduler.placement.cluster import Cluster
    from plexrl.scheduler.placement.waiting.units import Size
    from plexrl.scheduler.state.records import Deployment


SMALL = 8
"""A group hardly delays a deployment that needs more than this many times its GPUs: it lives on the
remainder that large deployments leave. Each job that need not share for that has no waiting."""


def is_scarce(cluster: "Cluster", deployment: "Deployment") -> bool:
    """Whether another eligible deployment needs more GPUs than are free."""
    return any(True for _ in _waiting_for_gpus(cluster, deployment))


def scarce_for(cluster: "Cluster", deployment: "Deployment") -> "Deployment | None":
    """The oldest of the first of each queue that are eligible and need more GPUs than are free:
    whatever the order in which the queues came to be, which a restart changes."""
    found = _waiting_for_gpus(cluster, deployment)
    return min(found, key=lambda each: each.serial, default=None)


def _waiting_for_gpus(cluster: "Cluster", deployment: "Deployment") -> "Iterator[Deployment]":
    """Other eligible deployments that need more GPUs than are free; if `deployment` has none yet,
    more than would be free after it got a group of its own. Deployments that need `SMALL` times as
    many GPUs do not count. One stands for its queue."""
    taken = deployment.spec.workers if deployment.placement.group is None else 0
    waiting, node_type, pool = (
        cluster.queues.waiting,
        deployment.spec.node_type,
        cluster.capacity.inventory.pool,
    )
    for size, tenants in waiting.pending_by_tenant.items():
        if not node_types_compatible(size.node_type, node_type):
            continue
        if size.workers > SMALL * deployment.spec.workers:
            continue
        if size.workers <= pool.free_gpus(size.node_type) - taken:
            continue
        for queue in tenants.values():
            # The first that is not `deployment` itself.
            other = cluster.state.deployment(queue[0][2])
            if other is deployment:
                if len(queue) == 1:
                    continue
                other = cluster.state.deployment(queue[1][2])
            if _is_eligible(cluster, other):
                yield other
    for name in waiting.of_partial_jobs:
        other = cluster.state.deployment(name)
        if (
            other is not deployment
            and node_types_compatible(other.spec.node_type, node_type)
            and other.spec.workers > pool.free_gpus(other.spec.node_type) - taken
            and _is_eligible(cluster, other)
        ):
            yield other


def _is_eligible(cluster: "Cluster", deployment: "Deployment") -> bool:
    """Whether only free GPUs are missing: the gang is complete, the quota allows the GPUs, and the
    nodes in service could hold it."""
    job = cluster.state.job(deployment.job)
    if (
        len(job.deployments) < job.gang
        or over_quota(cluster.holdings, job, deployment.spec.workers) is not None
    ):
        return False
    return is_possible(cluster, deployment)


def is_covered(sizes: "Iterable[Size]", blocking: "Collection[tuple[str, int]]") -> bool:
    """Whether requests equal to these sizes are blocking already."""
    return all((size.node_type, size.workers) in blocking for size in sizes)
