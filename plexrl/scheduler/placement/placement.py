"""Places deployments on groups and takes them off again (PlexRL §4.3.2).

A placement changes the state, the capacity index and the pool of free GPUs atomically. Every choice
depends on the state only (the group's number breaks ties), so a scheduler restored from a snapshot
decides as the original would have.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plexrl.errors import CapacityError
from plexrl.ids import GroupId
from plexrl.scheduler.accounting.sharing import settle_group
from plexrl.scheduler.placement.borders import divide, may_divide, unite_all
from plexrl.scheduler.placement.capacity.index import Shape, ShapeTable, sorted_passes
from plexrl.scheduler.placement.capacity.needs import kept_bytes, need_of
from plexrl.scheduler.placement.capacity.overlaps import refresh_overlap_flags
from plexrl.scheduler.placement.capacity.shift_search import Fit, ShiftSearch
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.contention.co_execution import added_stretch
from plexrl.scheduler.placement.contention.colocation import (
    own_group,
    siblings_group,
    with_own_group,
)
from plexrl.scheduler.placement.contention.contention import (
    Contention,
    ContentionConfig,
    Resident,
    predict,
)
from plexrl.scheduler.placement.contention.service_level import has_tight_bound, keeps_bounds
from plexrl.scheduler.placement.scarcity import is_scarce
from plexrl.scheduler.rules.policies import PlacementMode, attempts
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.rules.switch_cost import load_s, moves_at_best_s
from plexrl.scheduler.state.demand.trace import DemandTrace, project
from plexrl.scheduler.state.deployment.wpg import lose_processes
from plexrl.scheduler.state.group_lock import withdraw
from plexrl.scheduler.state.records import Deployment, Group, PlacementRecord, Reservation, State
from plexrl.wire.messages import RankPlacement

PREDICTIONS_MAX = 2
"""Best-fitting groups for which contention is predicted; each prediction takes milliseconds."""

PREDICTIONS_KEPT = 1024
"""Predictions cached before the cache is cleared."""

BORDER_S = 1.0
"""Cost of dividing a group: among groups that fit as well, one of equal size is chosen."""

SPILL_BYTES_PER_S = 1e9
"""Rate of a move to or from NVMe when host memory is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A group to join, or a part of it, and the shift of the reservation."""

    group: GroupId
    mode: PlacementMode
    shift_slots: int = 0
    overlap_s: float = 0.0
    interference_s: float = 0.0
    cost: float = 0.0
    contention: float | None = None
    """Predicted contention of the group with the newcomer; None: not predicted."""


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
    for mode, speed in attempts(allowed, cluster.inventory.speeds() if by_speed else ()):
        if mode == PlacementMode.DEDICATED:
            group = _new_group(cluster, deployment, speed)
            if group is None:
                continue
            choice = Choice(group=group.group, mode=mode, contention=0.0)
        else:
            found = find(cluster, deployment, mode, now, speed)
            if found is None:
                continue
            choice = found
        return join(cluster, deployment, choice, now)
    return None


def join(cluster: Cluster, deployment: Deployment, choice: Choice, now: float) -> Group:
    """Make `deployment` a member of a group, or of a part of it, by a choice made at `now`.

    Raises:
        CapacityError: the choice was strict and is no longer free; nothing changed.
    """
    group = cluster.state.groups[choice.group]
    if len(group.gpus) > deployment.workers:
        group = divide(cluster, group, deployment.workers, now)
    settle_group(cluster.state, group, now)
    group.members.append(deployment.deployment)
    put_on(deployment, (group,))
    trace = deployment.trace if deployment.shares else None
    start_slot = int(now) % cluster.settings.config.horizon_slots
    deployment.reservation = Reservation(
        shift=float(start_slot + choice.shift_slots), trace=trace, overlap_s=choice.overlap_s
    )
    try:
        cluster.inventory.reserve(deployment, strict=choice.mode == PlacementMode.STRICT)
    except CapacityError:
        group.members.remove(deployment.deployment)
        deployment.reservation = None
        put_on(deployment, ())
        unite_all(cluster, (group.group,), now)
        raise
    deployment.placement = PlacementRecord(
        at=now,
        way=choice.mode.value,
        group=group.group,
        members=len(group.members),
        shift_s=float(choice.shift_slots),
        setup_s=load_s(cluster.state, deployment),
        overlap_s=choice.overlap_s,
        interference_s=choice.interference_s,
        contention=choice.contention,
    )
    return group


def put_on(deployment: Deployment, groups: tuple[Group, ...]) -> None:
    """Put the deployment's ranks on these groups, which have as many GPUs."""
    deployment.groups = tuple(group.group for group in groups)
    gpus = [gpu for group in groups for gpu in group.gpus]
    deployment.ranks = tuple(
        RankPlacement(rank=rank, node=gpu.node, gpu=gpu.gpu) for rank, gpu in enumerate(gpus)
    )
    deployment.nodes = tuple(sorted({gpu.node for gpu in gpus}))


def modes(cluster: Cluster, deployment: Deployment, now: float) -> tuple[PlacementMode, ...]:
    """The placement modes to try for `deployment`, best first."""
    if not deployment.shares:
        return (PlacementMode.DEDICATED,)
    has_profile = deployment.trace is not None
    found = cluster.settings.policy.modes(
        has_profile=has_profile,
        is_patience_over=now >= patience_ends_at(cluster.settings, deployment),
        is_scarce=has_profile
        and cluster.settings.policy.repacks
        and is_scarce(cluster, deployment),
    )
    return with_own_group(cluster, deployment, found)


def patience_ends_at(settings: Settings, deployment: Deployment) -> float:
    """When a job without a profile stops waiting for a group of its own."""
    return deployment.created_at + settings.config.cold_start_patience_s


def leave(cluster: Cluster, deployment: Deployment, now: float) -> None:
    """Remove `deployment` from its groups; an empty group frees its GPUs."""
    state = cluster.state
    groups = state.groups_of(deployment)
    for group in groups:
        if deployment.preemptible:
            group.fillers.remove(deployment.deployment)
            continue
        settle_group(state, group, now)
        group.members.remove(deployment.deployment)
        if len(group.members) == 1:
            group.alone_since = now
    cluster.inventory.release(deployment)
    deployment.groups, deployment.reservation = (), None
    for group in groups:
        refresh_overlap_flags(cluster, group)
        if not group.members and not group.fillers:
            cluster.inventory.remove_group(group)
            state.former_switches += group.switches
            del state.groups[group.group]


def release_lock(state: State, deployment: Deployment) -> tuple[GroupId, ...]:
    """Free the locks of its groups if the WPG holds them; end the switch if it is the incoming one.
    Returns the groups, whose next steps must be decided."""
    withdraw(state, deployment)
    return deployment.groups


def vacate(cluster: Cluster, deployment: Deployment, now: float) -> tuple[GroupId, ...]:
    """Take a WPG with stopped processes off its groups; the caller sets its next state. Returns the
    groups, whose next steps must be decided."""
    groups = release_lock(cluster.state, deployment)
    leave(cluster, deployment, now)
    united = unite_all(cluster, groups, now)
    lose_processes(deployment)
    deployment.moves.cancel()
    cluster.relocating.pop(deployment.deployment, None)
    return groups + united


def find(
    cluster: Cluster,
    deployment: Deployment,
    mode: PlacementMode,
    now: float,
    speed: float | None = None,
) -> Choice | None:
    """The group that this mode chooses, on nodes of this speed only if one is given; changes
    nothing. Groups of the deployment's own job are chosen whatever their speed."""
    match mode:
        case PlacementMode.STRICT | PlacementMode.OVERLAP:
            strict = mode == PlacementMode.STRICT
            found = nearest(cluster, deployment, now, strict=strict, count=1, speed=speed)
            return found[0] if found else None
        case PlacementMode.PACKED | PlacementMode.EMPTIEST:
            return _by_load(cluster, deployment, mode, speed)
        case PlacementMode.CO_EXECUTED:
            return _by_round(cluster, deployment, speed)
        case PlacementMode.COLOCATED:
            own = own_group(cluster, deployment)
            return None if own is None else Choice(group=own.group.group, mode=mode)
        case PlacementMode.SIBLINGS:
            group = siblings_group(cluster, deployment)
            return None if group is None else Choice(group=group.group, mode=mode)
        case _:
            raise AssertionError(f"{mode} does not join an existing group")


def nearest(
    cluster: Cluster,
    deployment: Deployment,
    now: float,
    *,
    strict: bool,
    count: int,
    speed: float | None = None,
) -> list[Choice]:
    """At most `count` groups in which the deployment's trace fits, best first; with `speed` only
    those on nodes of this speed.

    Excludes groups in which a member or the newcomer would wait more than its job accepts (PlexRL
    §7.2). Contention is predicted for the best fitting groups only.
    """
    found: list[Choice] = []
    most = max(count, PREDICTIONS_MAX)
    for choice in fitting(cluster, deployment, now, strict=strict, count=most, speed=speed):
        group = cluster.state.groups[choice.group]
        expected = predicted_contention(cluster, deployment, group)
        if keeps_bounds(cluster, deployment, group, expected):
            found.append(choice if expected is None else replace(choice, contention=expected.group))
        if len(found) == count:
            break
    return found


def predicted_contention(
    cluster: Cluster, deployment: Deployment, group: Group
) -> Contention | None:
    """The predicted contention of `group` with `deployment`, which comes first in it; None if the
    demand of a member is unknown."""
    state, settings = cluster.state, cluster.settings
    if deployment.trace is None:
        return None
    residents = [_resident(state, deployment, deployment.trace, group.gpus[: deployment.workers])]
    for name in group.members:
        member = state.deployment(name)
        if member.reservation is None:
            return None
        # A policy that does not plan by time leaves the reservation as it was made.
        trace = member.reservation.trace or member.trace
        if trace is None:
            return None
        residents.append(_resident(state, member, trace, group.gpus))
    key = tuple(residents)
    known = cluster.contentions.get(key)
    if known is None:
        rule = ContentionConfig(
            anticipates=settings.anticipates,
            guards_slack=settings.policy.guards_slack,
            starvation_ratio=settings.config.starvation_ratio,
            starvation_bound_s=settings.config.starvation_bound_s,
            horizon_slots=settings.config.horizon_slots,
            period_tolerance=settings.config.period_tolerance,
            profile_cycles=settings.config.profile_cycles,
        )
        if len(cluster.contentions) >= PREDICTIONS_KEPT:
            cluster.contentions.clear()
        known = cluster.contentions[key] = predict(residents, rule)
    return known


def _resident(
    state: State,
    deployment: Deployment,
    trace: DemandTrace,
    ranks: tuple[RankPlacement, ...] | None = None,
) -> Resident:
    # Rounded to two digits. Each measured move changes the last digits, and the cached prediction
    # of the same residents would be lost.
    load, offload = moves_at_best_s(state, deployment, ranks)
    return Resident(trace=trace, load_s=float(f"{load:.2g}"), offload_s=float(f"{offload:.2g}"))


def fitting(
    cluster: Cluster,
    deployment: Deployment,
    now: float,
    *,
    strict: bool,
    count: int | None = None,
    speed: float | None = None,
) -> list[Choice]:
    """At most `count` groups in which the deployment's trace fits, best first."""
    trace = deployment.trace
    if trace is None:
        return []
    config, index = cluster.settings.config, cluster.inventory.index
    tables: list[tuple[ShapeTable, NDArray[np.intp]]] = []
    larger = cluster.settings.divides_groups
    for shape in _shapes(cluster, deployment, speed, or_larger=larger):
        table = index.table(shape)
        fits_row = can_take(cluster.settings, table, deployment, trace.duty)
        _exclude_own(cluster, shape, deployment, fits_row)
        rows = np.flatnonzero(fits_row)
        if table.gpus > deployment.workers:
            rows = rows[[_may_divide(cluster, table, row) for row in rows.tolist()]]
        if rows.size:
            tables.append((table, rows))
    if not tables:
        return []
    footprint = project(trace, config.horizon_slots, config.period_tolerance)
    wanted = ShiftSearch(
        footprint=footprint,
        start_slot=int(now) % config.horizon_slots,
        margin_slots=math.ceil(trace.jitter_s),
        interference_weight=config.interference_weight,
        strict=strict,
    )
    bound = 0.0 if strict else config.overlap_max * trace.busy_s
    found: list[tuple[float, int, GroupId, Fit]] = []
    for table, rows in tables:
        for some in sorted_passes(table, rows, table.load):
            fits = table.search(some, wanted)
            for fit in fits:
                if fit.overlap_s <= bound:
                    group = table.groups[fit.row]
                    assert group is not None, "the search returned a free row"
                    cost = fit.cost + _spill_s(table, fit.row, deployment)
                    if table.gpus > deployment.workers:
                        cost += BORDER_S
                    found.append((cost, int(table.serial[fit.row]), group, fit))
            if fits:
                break
    found.sort()
    return [
        Choice(
            group=group,
            mode=PlacementMode.STRICT if fit.overlap_s == 0 else PlacementMode.OVERLAP,
            shift_slots=fit.shift_slots,
            overlap_s=fit.overlap_s,
            interference_s=fit.interference_s,
            cost=cost,
        )
        for cost, _, group, fit in found[:count]
    ]


def can_take(
    settings: Settings, table: ShapeTable, deployment: Deployment, duty: float
) -> NDArray[np.bool_]:
    """Rows whose group has capacity for one more such member: [rows] bool."""
    # As large as the state of a member on all GPUs of the group would be.
    state_bytes = deployment.state_bytes * table.gpus // deployment.workers
    found = (
        table.is_open
        & (table.members < settings.config.residents_max)
        & (table.state_bytes_free >= state_bytes)
        & (table.load + duty <= settings.config.load_bound)
    )
    if not table.is_virtual:
        found &= table.fit_on_device(need_of(deployment).device_bytes, kept_bytes(deployment))
    return found


def _by_load(
    cluster: Cluster, deployment: Deployment, mode: PlacementMode, speed: float | None
) -> Choice | None:
    duty = cluster.inventory.duty(deployment)
    if deployment.trace is not None:
        duty = deployment.trace.duty
    best: tuple[tuple[float, ...], Choice] | None = None
    for shape in _shapes(cluster, deployment, speed):
        table = cluster.inventory.index.table(shape)
        fits_row = can_take(cluster.settings, table, deployment, duty)
        _exclude_own(cluster, shape, deployment, fits_row)
        rows = np.flatnonzero(fits_row)
        if not rows.size:
            continue
        load, members, serial = table.load[rows], table.members[rows], table.serial[rows]
        sign = -1 if mode == PlacementMode.PACKED else 1
        predictions = PREDICTIONS_MAX
        for at in np.lexsort((serial, sign * load, sign * members)):
            key = (sign * float(members[at]), sign * float(load[at]), float(serial[at]))
            if best is not None and key >= best[0]:
                break
            name = table.groups[rows[at]]
            assert name is not None, "a free row has capacity"
            group = cluster.state.groups[name]
            if not has_tight_bound(cluster, deployment, group):
                best = key, Choice(group=name, mode=mode)
                break
            if deployment.trace is None or not predictions:
                # A demand that is unknown cannot be shown to keep the bound.
                continue
            predictions -= 1
            expected = predicted_contention(cluster, deployment, group)
            if expected is not None and keeps_bounds(cluster, deployment, group, expected):
                best = key, Choice(group=name, mode=mode, contention=expected.group)
                break
    return None if best is None else best[1]


def _by_round(cluster: Cluster, deployment: Deployment, speed: float | None) -> Choice | None:
    """The group whose round takes the deployment at the least cost; the fullest among equals."""
    if deployment.trace is None:
        return None
    best: tuple[tuple[float, ...], Choice] | None = None
    for shape in _shapes(cluster, deployment, speed):
        table = cluster.inventory.index.table(shape)
        fits_row = can_take(cluster.settings, table, deployment, deployment.trace.duty)
        fits_row &= table.host_bytes_free >= deployment.state_bytes
        _exclude_own(cluster, shape, deployment, fits_row)
        for row in np.flatnonzero(fits_row).tolist():
            group = table.groups[row]
            assert group is not None, "a free row has capacity"
            cost = added_stretch(
                cluster.state, cluster.settings, cluster.state.groups[group], deployment
            )
            if cost is None:
                continue
            key = (cost, -float(table.load[row]), float(table.serial[row]))
            if best is None or key < best[0]:
                best = key, Choice(group=group, mode=PlacementMode.CO_EXECUTED, cost=cost)
    return None if best is None else best[1]


def _exclude_own(
    cluster: Cluster, shape: Shape, deployment: Deployment, fits_row: NDArray[np.bool_]
) -> None:
    """Exclude the group that the deployment is on, and those of rollouts that generate at the same
    time as this one: those of its job."""
    excluded = list(deployment.groups)
    if deployment.kind == "rollout":
        for name in cluster.state.job(deployment.job).deployments:
            each = cluster.state.deployments[name]
            if each.kind == "rollout" and not each.preemptible:
                excluded += each.groups
    for group in excluded:
        row = cluster.inventory.index.row(group, shape)
        if row is not None:
            fits_row[row] = False


def _may_divide(cluster: Cluster, table: ShapeTable, row: int) -> bool:
    group = table.groups[row]
    assert group is not None, "a free row has capacity"
    return may_divide(cluster.state, cluster.state.groups[group])


def _shapes(
    cluster: Cluster, deployment: Deployment, speed: float | None, *, or_larger: bool = False
) -> list[Shape]:
    need, inventory = need_of(deployment), cluster.inventory
    return [
        shape
        for shape in inventory.index.shapes(
            deployment.workers, deployment.node_type, or_larger=or_larger
        )
        if shape.gpu_memory_bytes >= need.on(shape.gpu_kind)
        and (speed is None or inventory.speed(shape) == speed)
    ]


def _spill_s(table: ShapeTable, row: int, deployment: Deployment) -> float:
    state_bytes = deployment.state_bytes * table.gpus // deployment.workers
    over = (state_bytes - max(0, int(table.host_bytes_free[row]))) * deployment.workers / table.gpus
    return max(0.0, over) / SPILL_BYTES_PER_S


def _new_group(cluster: Cluster, deployment: Deployment, speed: float | None) -> Group | None:
    gpus = cluster.inventory.find_gpus(deployment, speed)
    if gpus is None:
        return None
    state = cluster.state
    state.groups_made += 1
    node = state.nodes[gpus[0].node]
    group = Group(
        group=GroupId(f"g{state.groups_made}"),
        serial=state.groups_made,
        gpus=gpus,
        shared=not deployment.exclusive,
        node_type=node.node_type,
        gpu_memory_bytes=node.gpu_memory_bytes,
        gpu_kind=node.gpu_kind,
    )
    state.groups[group.group] = group
    cluster.inventory.add_group(group)
    return group
