"""Places deployments on groups and takes them off again (PlexRL §4.3.2).

A placement changes the state, the capacity index and the pool of free GPUs atomically. Every choice
depends on the state only (the group's number breaks ties), so a scheduler restored from a snapshot
decides as the original would have.
"""

from collections.abc import Mapping

from plexrl.errors import CapacityError
from plexrl.ids import GroupId
from plexrl.scheduler.accounting.sharing import settle_group
from plexrl.scheduler.placement.borders import divide, unite_all
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.needs import need_of
from plexrl.scheduler.placement.capacity.overlaps import refresh_overlap_flags
from plexrl.scheduler.placement.choice.scarcity import is_scarce
from plexrl.scheduler.placement.choice.search import GroupChoice, find
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.contention.colocation import with_own_group
from plexrl.scheduler.rules.policies import PlacementMode, attempts
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.rules.switch_cost import load_s
from plexrl.scheduler.state.demand.reservation import Reservation
from plexrl.scheduler.state.deployment.placement import PlacementRecord
from plexrl.scheduler.state.group_lock import withdraw
from plexrl.scheduler.state.records import Deployment, Group, State


def place(
    cluster: Cluster,
    deployment: Deployment,
    now: float,
    only: tuple[PlacementMode, ...] | None = None,
) -> Group | None:
    """Put `deployment` on a group, a new one if needed; None if it must wait.

    `only`: the modes to try; default: those of the policy.
    """
    allowed = modes(cluster, deployment, now) if only is None else only
    by_speed = need_of(deployment).by_speed
    for mode, speed in attempts(allowed, cluster.capacity.inventory.speeds() if by_speed else ()):
        if mode == PlacementMode.DEDICATED:
            group = _new_group(cluster.capacity, deployment, speed)
            if group is None:
                continue
            choice = GroupChoice(group=group.group, mode=mode, contention=0.0)
        else:
            found = find(cluster, deployment, mode, now, speed)
            if found is None:
                continue
            choice = found
        return join(cluster.capacity, deployment, choice, now)
    return None


def join(capacity: Capacity, deployment: Deployment, choice: GroupChoice, now: float) -> Group:
    """Make `deployment` a member of a group, or of a part of it, by a choice made at `now`.

    Raises:
        CapacityError: the choice was strict and is no longer free; nothing changed.
    """
    groups = _groups_for(capacity, deployment, choice, now)
    for each in groups:
        settle_group(capacity.state, each, now)
        each.members.append(deployment.deployment)
    put_on(deployment, groups)
    group = groups[0]
    trace = deployment.demand.trace if deployment.spec.shares else None
    start_slot = int(now) % capacity.settings.config.horizon_slots
    deployment.placement.reserve(
        Reservation(
            shift=float(start_slot + choice.shift_slots), trace=trace, overlap_s=choice.overlap_s
        )
    )
    try:
        capacity.inventory.reserve(deployment, strict=choice.mode == PlacementMode.STRICT)
    except CapacityError:
        names = deployment.placement.groups
        for each in groups:
            each.members.remove(deployment.deployment)
        deployment.placement.leave()
        put_on(deployment, ())
        unite_all(capacity, names, now)
        raise
    deployment.placement.note(
        PlacementRecord(
            at=now,
            way=choice.mode.value,
            group=group.group,
            members=len(group.members),
            shift_s=float(choice.shift_slots),
            setup_s=load_s(capacity.state, deployment),
            overlap_s=choice.overlap_s,
            interference_s=choice.interference_s,
            contention=choice.contention,
            by_prior=any(
                capacity.state.deployment(name).demand.has_prior
                for group in groups
                for name in group.members
            ),
        )
    )
    return group


def _groups_for(
    capacity: Capacity, deployment: Deployment, choice: GroupChoice, now: float
) -> tuple[Group, ...]:
    """The groups of a choice: the last is divided if it has more GPUs than are left to place, and
    free GPUs become a new one if it has fewer."""
    found, left = [], deployment.spec.workers
    for name in (choice.group, *choice.beside):
        group = capacity.state.groups[name]
        if len(group.gpus) > left:
            group = divide(capacity, group, left, now)
        found.append(group)
        left -= len(group.gpus)
    if left:
        rest = _new_group(capacity, deployment, None, left, beside=found[0])
        assert rest is not None, "the search found free GPUs"
        found.append(rest)
    return tuple(found)


def put_on(deployment: Deployment, groups: tuple[Group, ...]) -> None:
    """Put the deployment's ranks on these groups, which have as many GPUs."""
    gpus = [gpu for group in groups for gpu in group.gpus]
    deployment.placement.put_on(tuple(group.group for group in groups), gpus)


def modes(cluster: Cluster, deployment: Deployment, now: float) -> tuple[PlacementMode, ...]:
    """The placement modes to try for `deployment`, best first."""
    if not deployment.spec.shares:
        return (PlacementMode.DEDICATED,)
    has_profile = deployment.demand.trace is not None
    found = cluster.settings.policy.modes(
        has_profile=has_profile,
        is_patience_over=now >= patience_ends_at(cluster.settings, deployment),
        is_scarce=has_profile
        and cluster.settings.policy.repacks
        and is_scarce(cluster, deployment),
    )
    return with_own_group(cluster.capacity, deployment, found)


def patience_ends_at(settings: Settings, deployment: Deployment) -> float:
    """When a job without a profile stops waiting for a group of its own."""
    return deployment.created_at + settings.config.cold_start_patience_s


def leave(
    capacity: Capacity,
    deployment: Deployment,
    now: float,
    alone_since: Mapping[GroupId, float] | None = None,
    *,
    unites: bool = True,
) -> tuple[GroupId, ...]:
    """Remove `deployment` from its groups; an empty group frees its GPUs, and borders that nobody
    needs any more go. Returns the groups that have grown.

    `alone_since`: that of each group, if the placement is undone. `unites`: False leaves the
    borders to the caller, which has chosen among the groups that they divide.
    """
    state = capacity.state
    groups, names = state.groups_of(deployment), deployment.placement.groups
    for group in groups:
        if deployment.spec.preemptible:
            group.fillers.remove(deployment.deployment)
            continue
        settle_group(state, group, now)
        group.members.remove(deployment.deployment)
        if alone_since is not None:
            group.alone_since = alone_since[group.group]
        elif len(group.members) == 1:
            group.alone_since = now
    capacity.inventory.release(deployment)
    deployment.placement.leave()
    for group in groups:
        refresh_overlap_flags(capacity, group)
        if not group.members and not group.fillers:
            capacity.inventory.remove_group(group)
            state.former_switches += group.switches
            del state.groups[group.group]
    return unite_all(capacity, names, now) if unites else ()


def release_lock(state: State, deployment: Deployment) -> tuple[GroupId, ...]:
    """Free the locks of its groups if the WPG holds them; end the switch if it is the incoming one.
    Returns the groups, whose next steps must be decided."""
    withdraw(state, deployment)
    return deployment.placement.groups


def vacate(
    cluster: Cluster, deployment: Deployment, now: float, *, unites: bool = True
) -> tuple[GroupId, ...]:
    """Take a WPG with stopped processes off its groups; the caller sets its next state. Returns the
    groups, whose next steps must be decided. `unites`: as for `leave`."""
    groups = release_lock(cluster.state, deployment)
    united = leave(cluster.capacity, deployment, now, unites=unites)
    deployment.wpg.lose_processes()
    deployment.wpg.moves.cancel()
    cluster.queues.end_move(deployment)
    return groups + united


def _new_group(
    capacity: Capacity,
    deployment: Deployment,
    speed: float | None,
    count: int | None = None,
    beside: Group | None = None,
) -> Group | None:
    gpus = capacity.inventory.find_gpus(deployment, speed, count, beside)
    if gpus is None:
        return None
    state = capacity.state
    state.groups_made += 1
    node = state.nodes[gpus[0].node]
    group = Group(
        group=GroupId(f"g{state.groups_made}"),
        serial=state.groups_made,
        gpus=gpus,
        shared=not deployment.spec.exclusive,
        node_type=node.node_type,
        gpu_memory_bytes=node.gpu_memory_bytes,
        gpu_kind=node.gpu_kind,
    )
    state.groups[group.group] = group
    capacity.inventory.add_group(group)
    return group
