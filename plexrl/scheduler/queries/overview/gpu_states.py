"""Counts the GPUs by state, the bytes of states by tier, and what waits: a few microseconds for
each group.

Bytes are those of the whole state as it was declared. A state that is on GPUs may also be stored:
then it counts in both places, as it takes memory in both.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from plexrl.ids import DeploymentId, NodeId, TenantId
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import count_impossible, is_possible
from plexrl.scheduler.queries.eta import eta_quality
from plexrl.scheduler.queries.overview.possible import can_get_gpus
from plexrl.scheduler.state.deployment.wpg.wpg import Wpg
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.records import Deployment, Group, Job, Node, State
from plexrl.wire.messages.overview_views import (
    BLOCKS_MAX,
    COMPUTING,
    DRAINING,
    FREE,
    GPU_STATES,
    IDLE,
    LOST,
    OTHERS,
    SWITCHING,
    BlockCounts,
    GpuCounts,
    JobMemoryView,
    OverviewView,
    TierBytes,
)

_ON_GPUS = (Residency.DEVICE, Residency.MOVING)


def overview(cluster: Cluster, tenant: TenantId | None, now: float) -> OverviewView:
    """The cluster at `now`, for one tenant or for an operator (None)."""
    state = cluster.state
    counts = _count(state, tenant, lambda node: node.node_type)
    blocks = _count(state, tenant, lambda node: node.block)
    groups = visible_groups(state, tenant)
    impossible = count_impossible(cluster, tenant)
    turns = [
        state.operations[each.work.queue[0]].submitted_at
        for each in taking_turns(state, groups, tenant)
    ]
    view: OverviewView = {
        "now": now,
        "gpus": _view("", counts.values()),
        "node_types": [_view(name, [counts[name]]) for name in sorted(counts)],
        "blocks": [_block(name, blocks[name]) for name in sorted(blocks)][:BLOCKS_MAX],
        "memory": total(tiers_of(each) for each in _members(state, groups, tenant)),
        "nodes": len(state.nodes),
        "groups": len(groups),
        "jobs_live": _live_jobs(cluster, tenant),
        "waiting": max(0, _in_queue(cluster, tenant) - impossible),
        "impossible": impossible,
        "waiting_since": _oldest(cluster, tenant, impossible),
        "turns": len(turns),
        "turns_since": min(turns, default=None),
        "eta_quality": eta_quality(state.eta_errors),
    }
    if tenant is None:
        switches = sum(group.switches for group in groups)
        view["switches"] = state.former_switches + switches
        view["switch_seconds"] = sum(group.switch_seconds for group in groups)
    return view


def tiers_of(deployment: Deployment) -> TierBytes:
    """The bytes of one deployment."""
    state_bytes, wpg = deployment.spec.state_bytes, deployment.wpg
    nvme = min(state_bytes, _nvme_bytes(wpg))
    return {
        "gpu": state_bytes if wpg.residency in _ON_GPUS else 0,
        "host": state_bytes - nvme if wpg.stored.nodes else 0,
        "nvme": nvme,
    }


def memory_of(state: State, job: Job) -> list[JobMemoryView]:
    """The bytes of each deployment of a job that has any."""
    found = [(state.deployments[name], name) for name in job.deployments]
    views: list[JobMemoryView] = [
        {"deployment": name, "bytes": tiers_of(deployment)} for deployment, name in found
    ]
    return [view for view in views if any(view["bytes"].values())]


def total(found: Iterable[TierBytes]) -> TierBytes:
    """Their sum."""
    sums: TierBytes = {"gpu": 0, "host": 0, "nvme": 0}
    for each in found:
        sums["gpu"] += each["gpu"]
        sums["host"] += each["host"]
        sums["nvme"] += each["nvme"]
    return sums


def visible_groups(state: State, tenant: TenantId | None) -> list[Group]:
    """The groups that the caller may see, in the order of their creation."""
    found = [group for group in state.groups.values() if has_member(state, group, tenant)]
    return sorted(found, key=lambda group: group.serial)


def has_member(state: State, group: Group, tenant: TenantId | None) -> bool:
    """Whether a deployment of the tenant is in the group; of an operator (None) all are."""
    if tenant is None:
        return True
    return any(owner(state, name) == tenant for name in (*group.members, *group.fillers))


def owner(state: State, name: DeploymentId) -> TenantId:
    """The tenant of a deployment."""
    return state.jobs[state.deployments[name].job].tenant


def taking_turns(
    state: State, groups: Iterable[Group], tenant: TenantId | None
) -> Iterator[Deployment]:
    """The members of `groups` whose next operation waits for their turn, each once."""
    for deployment in _members(state, groups, tenant):
        if deployment.work.queue and not deployment.work.running:
            yield deployment


def _in_queue(cluster: Cluster, tenant: TenantId | None) -> int:
    waiting = cluster.queues.waiting
    return len(waiting) if tenant is None else waiting.by_tenant.get(tenant, 0)


def _oldest(cluster: Cluster, tenant: TenantId | None, impossible: int) -> float | None:
    """Creation of the oldest waiting deployment, without the `impossible` ones."""
    state, table = cluster.state, cluster.queues.waiting.table
    is_shown = table.is_used
    if impossible:
        is_shown = is_shown & can_get_gpus(cluster)
    if tenant is not None:
        number = table.tenants.number(tenant)
        is_shown = is_shown & (table.tenant == (-1 if number is None else number))
    # Nearly always each is in a unit of its own, and none is left to look for.
    rest = cluster.queues.waiting.in_no_unit() if len(cluster.queues.waiting) > len(table) else []
    found = [
        state.deployments[name].created_at
        for name in rest
        if tenant in (None, owner(state, name))
        and (not impossible or is_possible(cluster, state.deployments[name]))
    ]
    if is_shown.any():
        found.append(float(table.created_at[is_shown].min()))
    return min(found, default=None)


def _live_jobs(cluster: Cluster, tenant: TenantId | None) -> int:
    live = cluster.holdings.live_jobs
    return sum(live.values()) if tenant is None else live.get(tenant, 0)


def _members(
    state: State, groups: Iterable[Group], tenant: TenantId | None
) -> Iterator[Deployment]:
    """The members of `groups` that the caller may see, each once."""
    for name in dict.fromkeys([name for g in groups for name in (*g.members, *g.fillers)]):
        if tenant in (None, owner(state, name)):
            yield state.deployments[name]


def _block(name: str, counts: Counter[str]) -> BlockCounts:
    found = _view("", [counts])
    return {"block": name, "gpus": found["gpus"], "states": found["states"]}


def _count(
    state: State, tenant: TenantId | None, key: Callable[[Node], str]
) -> dict[str, Counter[str]]:
    """GPUs by state, by a property of their nodes.

    After a start of the scheduler nodes are not alive until their agents connect. What runs on
    them goes on meanwhile; what is in no group cannot be used.
    """
    counts: dict[str, Counter[str]] = {key(node): Counter() for node in state.nodes.values()}
    grouped: Counter[NodeId] = Counter()
    for group in state.groups.values():
        phase = _phase(state, group, tenant)
        for name, gpus in Counter([gpu.node for gpu in group.gpus]).items():
            grouped[name] += gpus
            node = state.nodes[name]
            counts[key(node)][LOST if node.lost_at is not None else phase] += gpus
    for node in state.nodes.values():
        counts[key(node)][_without_group(node)] += max(0, node.gpus - grouped[node.node])
    return counts


def _phase(state: State, group: Group, tenant: TenantId | None) -> str:
    if tenant is not None and not has_member(state, group, tenant):
        return OTHERS
    if group.holder is None:
        return IDLE
    holder = state.deployments[group.holder]
    if tenant is not None and owner(state, group.holder) != tenant:
        # What another tenant's job does on them is not told.
        return OTHERS
    if holder.wpg.moving is not None:
        return SWITCHING
    return COMPUTING if holder.work.running else IDLE


def _without_group(node: Node) -> str:
    if not node.alive:
        return LOST
    return DRAINING if node.is_draining else FREE


def _view(node_type: str, counts: Iterable[Counter[str]]) -> GpuCounts:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    states = {name: total[name] for name in GPU_STATES if total[name]}
    return {"node_type": node_type, "gpus": total.total(), "states": states}


def _nvme_bytes(wpg: Wpg) -> int:
    stored = wpg.stored
    return sum(stored.nvme_bytes_by_node.get(node, 0) for node in stored.nodes)
