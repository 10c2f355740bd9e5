"""Whether deployments can have GPUs at the same time: on the whole cluster, or on the nodes in
service.

One search answers two questions. Before a deployment is accepted: could the empty cluster hold it
together with the other deployments of its job? A refusal is final, so in doubt the answer
is yes. While it waits: would it get its GPUs if all other jobs ended now? Only then it may
block others from free GPUs, so in doubt the answer is no.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.inventory import Turns
from plexrl.scheduler.placement.capacity.needs import (
    Need,
    fits_as_placed,
    need_of,
    suits,
)
from plexrl.scheduler.placement.capacity.node_pool import NodeKind, fabric_note
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.contention.colocation import is_worthwhile
from plexrl.scheduler.placement.fit import backtracking
from plexrl.scheduler.placement.fit.rehearsal import Rehearsal, in_placement_order
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.placement.waiting.units import Unit
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.records import Deployment, Job, State

if TYPE_CHECKING:
    from plexrl.ids import NodeId, TenantId


HELD_GANGS_MAX: Final = 4096
"""Largest number of gangs of which it is kept whether the nodes hold them."""


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
    for deployment in deployments:
        if deployment.spec.shares and settings.anybody_shares:
            sharing.setdefault(deployment.spec.workers, []).append(deployment)
    joined = {member.deployment for members in sharing.values() for member in members}
    alone = [deployment for deployment in deployments if deployment.deployment not in joined]
    found = [need_of(each) for each in alone]
    most = settings.config.residents_max
    for workers, members in sorted(sharing.items()):
        spare = 0
        counts: dict[str, int] = {}
        for member in members:
            counts[member.spec.node_type] = counts.get(member.spec.node_type, 0) + 1
        untyped = counts.pop("", 0)
        for node_type, count in sorted(counts.items()):
            groups = -(-count // most)
            spare += groups * most - count
            found += [Need(workers, node_type, 0)] * groups
        found += [Need(workers, "", 0)] * -(-max(0, untyped - spare) // most)
        # Rollouts of a job never share a group with each other.
        apart = sum(member.spec.kind == "rollout" for member in members)
        made = sum(each.workers == workers for each in found[len(alone) :])
        found += [Need(workers, "", 0)] * (apart - made)
    return found


def is_possible(cluster: Cluster, deployment: Deployment) -> bool:
    """Whether a waiting deployment and its gang would get GPUs on the nodes in service if all other
    jobs ended now."""
    job, inventory = cluster.state.job(deployment.job), cluster.capacity.inventory
    gang = gang_of(cluster.queues, deployment)
    if len(job.deployments) == 1:
        need = need_of(deployment)
        known = inventory.holds.get(need)
        if known is None:
            known = inventory.holds[need] = fits_as_placed(inventory.in_service(), [need])
        return known
    free = dict(inventory.in_service())
    members = [cluster.state.deployment(name) for name in job.deployments]
    groups = {group: None for member in members for group in member.placement.groups}
    if not groups:
        return _holds_gang(cluster.capacity, gang, members)
    for group in groups:
        for kind, gpus in inventory.gpus_in_service(cluster.state.groups[group]).items():
            free[kind] -= gpus
    return _fit_on_rollouts(cluster.capacity, free, gang)[0]


def _holds_gang(
    capacity: Capacity, gang: Sequence[Deployment], members: Sequence[Deployment]
) -> bool:
    """Whether the nodes in service hold a gang of a job without GPUs. A pass asks so for each gang
    that starves. The answer is kept while the nodes are the same, and the same turns are
    worthwhile: that follows from measured moves."""
    inventory = capacity.inventory
    key = (
        *[each.deployment for each in gang],
        *[
            (
                *(member.deployment, member.spec.workers, member.spec.state_bytes),
                *(member.demand.trace, member.demand.memory, member.spec.shares),
            )
            for member in members
        ],
    )
    known = inventory.holds_gangs.get(key)
    if known is None or any(
        is_worthwhile(capacity, members) is not found for members, found in known[1]
    ):
        if len(inventory.holds_gangs) >= HELD_GANGS_MAX:
            inventory.holds_gangs.clear()
        known = _fit_on_rollouts(capacity, inventory.in_service(), gang)
        inventory.holds_gangs[key] = known
    return known[0]


def expects_nodes(state: State) -> bool:
    """Whether the scheduler has started, and agents that may connect have not: then nobody can say
    yet that the nodes cannot hold a deployment."""
    return any(not node.alive and node.lost_at is None for node in state.nodes.values())


def why_impossible(cluster: Cluster, deployment: Deployment) -> str | None:
    """Why `is_possible` is False; None if it is True, or may be once all agents have connected."""
    if is_possible(cluster, deployment) or expects_nodes(cluster.state):
        return None
    return _why(
        cluster.capacity, cluster.state.job(deployment.job), gang_of(cluster.queues, deployment)
    )


def possible_alike(unit: Unit) -> object:
    """Key of a waiting unit: `is_possible` is the same for units with equal ones."""
    # Traces differ from job to job. For a single deployment only the size matters.
    demand = unit.equivalence.demand
    return unit.sizes, (demand[0][0] if len(demand) == 1 else demand)


def count_impossible(cluster: Cluster, tenant: "TenantId | None") -> int:
    """Number of waiting deployments, of one tenant or of all, for which `is_possible` is False; 0
    until all agents have connected. Checked once for equal needs."""
    if expects_nodes(cluster.state):
        return 0
    waiting = cluster.queues.waiting
    known: dict[object, bool] = {}
    count = 0
    for unit, units in waiting.kinds():
        if tenant is not None and unit.equivalence.owner.tenant != tenant:
            continue
        key = possible_alike(unit)
        is_held = known.get(key)
        if is_held is None:
            is_held = known[key] = is_possible(cluster, cluster.state.deployment(unit.head.name))
        if not is_held:
            count += units * len(unit.sizes)
    for name in waiting.in_no_unit():
        deployment = cluster.state.deployment(name)
        is_asked = tenant in (None, cluster.state.job(deployment.job).tenant)
        count += is_asked and not is_possible(cluster, deployment)
    return count


def fit_as_placed(
    capacity: Capacity, free: Mapping[NodeKind, int], deployments: Sequence[Deployment]
) -> bool:
    """Whether `deployments` get GPUs one after the other, those that are certain to share GPUs
    together, as a `Rehearsal` finds."""
    order = in_placement_order(deployments)
    for turns_first in (False, True):
        rehearsal = Rehearsal(capacity, free, turns_first=turns_first)
        if all(rehearsal.place(each) for each in order):
            return True
    return False


def _fit_on_rollouts(
    capacity: Capacity, free: Mapping[NodeKind, int], deployments: Sequence[Deployment]
) -> tuple[bool, Turns]:
    """As `fit_as_placed`; a training may also be on the GPUs of its smaller rollouts, once these
    are placed. Also returns the turns on which the answer rests. Reservations do not count on it:
    they would be earlier, and leave others less room than they need (3.5 % of the drain of a
    simulated backlog)."""
    if fit_as_placed(capacity, free, deployments):
        return True, ()
    order = in_placement_order(deployments)
    if not capacity.settings.divides_groups or not any(map(_is_shared_rollout, order)):
        return False, ()
    rehearsal = Rehearsal(capacity, free, turns_first=True)
    rollouts_first = sorted(order, key=lambda each: not _is_shared_rollout(each))
    fits = all(rehearsal.span(each) or rehearsal.place(each) for each in rollouts_first)
    return fits, rehearsal.asked


def _is_shared_rollout(deployment: Deployment) -> bool:
    return deployment.spec.kind == "rollout" and deployment.spec.shares


def gang_of(queues: Queues, deployment: Deployment) -> list[Deployment]:
    """The waiting deployments that get GPUs at the same time as `deployment`, including itself."""
    job = queues.state.job(deployment.job)
    if not job.gang:
        return [deployment]
    return [queues.state.deployment(name) for name in job.deployments if name in queues.waiting]


def _why(capacity: Capacity, job: Job, gang: Sequence[Deployment]) -> str:
    wanted = sum(each.spec.workers for each in gang)
    types = sorted({each.spec.node_type for each in gang if each.spec.node_type})
    of_type = f" of type {' and '.join(map(repr, types))}" if types else ""
    together = " at once" if len(gang) > 1 else ""
    others = len(job.deployments) - len(gang)
    more = ", in addition to those its job holds," if others else ""
    free = capacity.inventory.in_service()
    there = sum(gpus for kind, gpus in free.items() if not types or kind.node_type in types)
    note = fabric_note(kind for kind in free if there >= wanted)
    away = _away(capacity.state)
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
