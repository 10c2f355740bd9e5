"""Whether deployments can have GPUs at the same time: on the whole cluster, or on the nodes in
service.

One search answers two questions. Before a deployment is accepted: could the empty cluster hold it
together with the other deployments of its job? A refusal is final, so in doubt the answer
is yes. While it waits: would it get its GPUs if all other jobs ended now? Only then it may
block others from free GPUs, so in doubt the answer is no.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from plexrl.scheduler.admission.fit import backtracking
from plexrl.scheduler.context.cluster import Cluster
from plexrl.scheduler.context.settings import Settings
from plexrl.scheduler.placement.capacity.needs import (
    Need,
    fits_as_placed,
    least_memory,
    need_of,
    suits,
)
from plexrl.scheduler.placement.capacity.node_pool import NodeKind, fabric_note, is_in_service
from plexrl.scheduler.placement.contention.colocation import may_share
from plexrl.scheduler.placement.policies import PlacementMode
from plexrl.scheduler.state.records import Deployment, Job, Node, State

if TYPE_CHECKING:
    from plexrl.ids import DeploymentId, NodeId, TenantId


def fits(free: Mapping[NodeKind, int], needs: Sequence[Need]) -> bool:
    """Whether the free GPUs of each kind hold all `needs` at once; also true if the search takes
    too long. Kinds of nodes and needs are few."""
    left = dict(free)
    order = sorted(needs, reverse=True)
    wanted = [0] * (len(order) + 1)
    for at in range(len(order) - 1, -1, -1):
        wanted[at] = wanted[at + 1] + order[at].workers

    def options(at: int) -> Iterator[bool]:
        if wanted[at] > sum(left.values()):
            return
        need = order[at]
        tried = set()
        for kind, gpus in left.items():
            # Nodes that share no group differ in their fabric only.
            equal = kind.node_type, kind.gpu_memory_bytes, kind.gpu_kind, gpus
            if gpus < need.workers or not suits(kind, need) or equal in tried:
                yield False
                continue
            tried.add(equal)
            left[kind] = gpus - need.workers
            yield True
            left[kind] = gpus

    return backtracking.is_possible(len(order), options)


def least_needs(settings: Settings, deployments: Sequence[Deployment]) -> list[Need]:
    """A lower bound of the GPUs for `deployments`: all that may share a group do, whatever memory
    they need."""
    sharing: dict[int, list[Deployment]] = {}
    for each in deployments:
        if each.shares and settings.anybody_shares:
            sharing.setdefault(each.workers, []).append(each)
    joined = {each.deployment for members in sharing.values() for each in members}
    alone = [each for each in deployments if each.deployment not in joined]
    found = [need_of(each) for each in alone]
    most = settings.config.residents_max
    for workers, members in sorted(sharing.items()):
        spare = 0
        counts: dict[str, int] = {}
        for each in members:
            counts[each.node_type] = counts.get(each.node_type, 0) + 1
        untyped = counts.pop("", 0)
        for node_type, count in sorted(counts.items()):
            groups = -(-count // most)
            spare += groups * most - count
            found += [Need(workers, node_type, 0)] * groups
        found += [Need(workers, "", 0)] * -(-max(0, untyped - spare) // most)
        # Rollouts of a job never share a group with each other.
        apart = sum(each.kind == "rollout" for each in members)
        made = sum(each.workers == workers for each in found[len(alone) :])
        found += [Need(workers, "", 0)] * (apart - made)
    return found


def is_possible(cluster: Cluster, deployment: Deployment) -> bool:
    """Whether a waiting deployment and its gang would get GPUs on the nodes in service if all other
    jobs ended now."""
    job, inventory = cluster.state.job(deployment.job), cluster.inventory
    gang = gang_of(cluster, deployment)
    if len(job.deployments) == 1:
        need = need_of(deployment)
        known = inventory.holds.get(need)
        if known is None:
            known = inventory.holds[need] = fits_as_placed(inventory.in_service(), [need])
        return known
    free = dict(inventory.in_service())
    groups = {each.group: None for each in map(cluster.state.deployment, job.deployments)}
    for group in groups:
        if group is not None:
            for kind, gpus in inventory.gpus_in_service(cluster.state.groups[group]).items():
                free[kind] -= gpus
    return fit_as_placed(cluster, free, gang)


def why_impossible(cluster: Cluster, deployment: Deployment) -> str | None:
    """Why `is_possible` is False; None if it is True."""
    if is_possible(cluster, deployment):
        return None
    return _why(cluster, cluster.state.job(deployment.job), gang_of(cluster, deployment))


def count_impossible(cluster: Cluster, tenant: "TenantId | None") -> int:
    """Number of waiting deployments, of one tenant or of all, for which `is_possible` is False.
    Checked once for equal needs."""
    waiting = cluster.waiting
    known: dict[object, bool] = {}
    count = 0
    for sizes, equivalence, queue in waiting.queues():
        if tenant is not None and equivalence.owner.tenant != tenant:
            continue
        # Traces differ from job to job. For a single deployment only the size matters.
        demand = equivalence.demand
        key = sizes, (demand[0][0] if len(demand) == 1 else demand)
        is_held = known.get(key)
        if is_held is None:
            is_held = known[key] = is_possible(cluster, cluster.state.deployment(queue[0][1]))
        if not is_held:
            count += len(queue) * len(sizes)
    for name in waiting.in_no_queue():
        deployment = cluster.state.deployment(name)
        is_asked = tenant in (None, cluster.state.job(deployment.job).tenant)
        count += is_asked and not is_possible(cluster, deployment)
    return count


def fit_as_placed(
    cluster: Cluster, free: Mapping[NodeKind, int], deployments: Sequence[Deployment]
) -> bool:
    """Whether `deployments` get GPUs one after the other, each GPUs of its own, except those that
    are certain to share one group."""
    order = sorted(deployments, key=lambda d: (-d.workers, d.created_at, d.deployment))
    if fits_as_placed(free, [need_of(each) for each in order]):
        return True
    if not _may_pack(cluster, order):
        for joining in (_paired(cluster, order), _siblings(cluster, order)):
            left = [need_of(each) for each in order if each.deployment not in joining]
            if joining and fits_as_placed(free, left):
                return True
        return False
    found: list[Need] = []
    groups: dict[tuple[int, str], int] = {}
    rollouts: dict[tuple[int, str], int] = {}
    for each in order:
        key = each.workers, each.node_type
        if each.shares:
            # One group holds all of them, except that each rollout has another one.
            rollouts[key] = rollouts.get(key, 0) + (each.kind == "rollout")
            wanted = rollouts[key] if each.kind == "rollout" else 1
            if groups.get(key, 0) >= wanted:
                continue
            groups[key] = groups.get(key, 0) + 1
        found.append(need_of(each))
    return fits_as_placed(free, found)


def gang_of(cluster: Cluster, deployment: Deployment) -> list[Deployment]:
    """The waiting deployments that get GPUs at the same time as `deployment`, including itself."""
    job = cluster.state.job(deployment.job)
    if not job.gang:
        return [deployment]
    return [cluster.state.deployment(name) for name in job.deployments if name in cluster.waiting]


def _may_pack(cluster: Cluster, deployments: Sequence[Deployment]) -> bool:
    """Whether deployments of equal size are certain to share one group."""
    if len(deployments) < 2:
        return False
    modes = cluster.settings.policy.modes(
        has_profile=False, is_patience_over=False, is_scarce=False
    )
    if PlacementMode.PACKED not in modes:
        return False
    return _one_group_holds(cluster, [each for each in deployments if each.shares])


def _siblings(cluster: Cluster, deployments: Sequence[Deployment]) -> set["DeploymentId"]:
    """The deployments that are certain to have the group of another of these."""
    if not cluster.settings.policy.repacks:
        return set()
    groups: dict[tuple[int, str], list[Deployment]] = {}
    for each in deployments:
        if each.shares and each.kind != "rollout":
            groups.setdefault((each.workers, each.node_type), []).append(each)
    found: set[DeploymentId] = set()
    for members in groups.values():
        if _one_group_holds(cluster, members):
            found.update([each.deployment for each in members[1:]])
    return found


def _one_group_holds(cluster: Cluster, sharing: Sequence[Deployment]) -> bool:
    config, nodes = cluster.settings.config, cluster.state.nodes.values()
    duties = [cluster.inventory.duty_when_placed(each) for each in sharing]
    usable = [node for node in nodes if is_in_service(node)]
    tiers = min((node.host_memory_bytes + node.nvme_bytes for node in usable), default=0)
    return (
        len(sharing) <= config.residents_max
        and math.fsum(duties) <= config.load_max
        and sum(each.state_bytes for each in sharing) <= tiers
        and _have_memory(usable, sharing)
    )


def _have_memory(nodes: Sequence[Node], sharing: Sequence[Deployment]) -> bool:
    """Whether the GPUs of every node let these deployments work in turns."""
    kinds = {(node.gpu_kind, node.gpu_memory_bytes) for node in nodes}
    return all(least_memory(kind, sharing) <= memory for kind, memory in kinds)


def _paired(cluster: Cluster, deployments: Sequence[Deployment]) -> set["DeploymentId"]:
    """The rollouts that are certain to have the group of another of these deployments."""
    if not cluster.settings.anybody_shares or cluster.settings.config.residents_max < 2:
        return set()
    nodes = [node for node in cluster.state.nodes.values() if is_in_service(node)]
    tiers = min((node.host_memory_bytes + node.nvme_bytes for node in nodes), default=0)
    found: dict[DeploymentId, DeploymentId] = {}
    for rollout in deployments:
        for other in deployments if rollout.kind == "rollout" else ():
            if (
                other.deployment not in found.values()
                and (other.workers, other.node_type) == (rollout.workers, rollout.node_type)
                and other.shares
                and rollout.shares
                and may_share(cluster, (other, rollout))
                and other.state_bytes + rollout.state_bytes <= tiers
                and _have_memory(nodes, (other, rollout))
            ):
                found[rollout.deployment] = other.deployment
                break
    return set(found)


def _why(cluster: Cluster, job: Job, gang: Sequence[Deployment]) -> str:
    wanted = sum(each.workers for each in gang)
    types = sorted({each.node_type for each in gang if each.node_type})
    of_type = f" of type {' and '.join(map(repr, types))}" if types else ""
    together = " at once" if len(gang) > 1 else ""
    others = len(job.deployments) - len(gang)
    more = ", in addition to those its job holds," if others else ""
    free = cluster.inventory.in_service()
    there = sum(gpus for kind, gpus in free.items() if not types or kind.node_type in types)
    note = fabric_note(kind for kind in free if there >= wanted)
    away = _away(cluster.state)
    ending = f": {'; '.join(away)}" if away else ""
    return (
        f"{wanted} GPUs{of_type}{together}{more} are more than the {there} GPUs{of_type} of the "
        f"nodes in service can give{note}{ending}; it waits until they can, and blocks no other job"
    )


def _away(state: State) -> list[str]:
    """The nodes that are not in service; at most three of each kind by name."""
    lost: list[NodeId] = []
    drained: list[NodeId] = []
    for node in state.nodes.values():
        if not node.alive:
            lost.append(node.node)
        elif node.is_draining:
            drained.append(node.node)
    found = []
    for names, what in ((lost, "lost"), (drained, "being drained")):
        if names:
            some = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            found.append(f"{some} {'is' if len(names) == 1 else 'are'} {what}")
    return found
