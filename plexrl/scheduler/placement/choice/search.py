"""Searches for a group that a deployment may join; changes nothing (PlexRL §4.3.2).

Every choice depends on the state only (the group's number breaks ties), so a scheduler restored
from a snapshot decides as the original would have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plexrl.ids import DeploymentId, GroupId
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.index import ShapeTable, sorted_passes
from plexrl.scheduler.placement.capacity.shift_search import PeriodProfiles, ShiftFit, ShiftSearch
from plexrl.scheduler.placement.choice.candidates import (
    can_take,
    exclude_own,
    intervals_of,
    is_alike,
    is_awaited,
    is_divisible,
    members_of,
    shapes,
    unions,
)
from plexrl.scheduler.placement.choice.scarcity import is_scarce
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.contention.co_execution import added_stretch
from plexrl.scheduler.placement.contention.colocation import (
    is_colocated,
    own_group,
    own_rollout_groups,
    siblings_group,
)
from plexrl.scheduler.placement.contention.contention import (
    Contention,
    Resident,
)
from plexrl.scheduler.placement.contention.service_level import has_tight_bound, keeps_bounds
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.rules.switch_cost import moves_at_best_s
from plexrl.scheduler.state.demand.trace import DemandTrace, project
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.messages import RankPlacement

PREDICTIONS_MAX = 2
"""Best-fitting groups for which contention is predicted; each prediction takes milliseconds."""
"""Predictions cached before the cache is cleared."""

BORDER_S = 1.0
"""Cost of dividing a group: among groups that fit as well, one of equal size is chosen."""

TINY = 1e-9
"""Far below any part of a time."""

SPILL_BYTES_PER_S = 1e9
"""Rate of a move to or from NVMe when host memory is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChoice:
    """A group to join, or a part of it, and the shift of the reservation."""

    group: GroupId
    beside: tuple[GroupId, ...] = ()
    """Further groups, for ranks beyond the GPUs of the first; the ranks that are left then get
    free GPUs."""
    mode: PlacementMode
    shift_slots: int = 0
    overlap_s: float = 0.0
    interference_s: float = 0.0
    cost: float = 0.0
    contention: float | None = None
    """Predicted contention of the group with the newcomer; None: not predicted."""


def find(
    cluster: Cluster,
    deployment: Deployment,
    mode: PlacementMode,
    now: float,
    speed: float | None = None,
) -> GroupChoice | None:
    """The group that this mode chooses, on nodes of this speed only if one is given; changes
    nothing. Groups of the deployment's own job are chosen whatever their speed."""
    match mode:
        case PlacementMode.STRICT | PlacementMode.OVERLAP:
            strict = mode == PlacementMode.STRICT
            found = nearest(cluster, deployment, now, strict=strict, count=1, speed=speed)
            return found[0] if found else None
        case PlacementMode.PACKED | PlacementMode.EMPTIEST:
            return _by_load(cluster.capacity, deployment, mode, speed)
        case PlacementMode.CO_EXECUTED:
            return _by_round(cluster.capacity, deployment, speed)
        case PlacementMode.COLOCATED:
            own = own_group(cluster.capacity, deployment)
            return None if own is None else GroupChoice(group=own.group.group, mode=mode)
        case PlacementMode.SPANNING:
            return _spanning(cluster, deployment, now)
        case PlacementMode.SIBLINGS:
            group = siblings_group(cluster.capacity, deployment)
            return None if group is None else GroupChoice(group=group.group, mode=mode)
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
    beside: Sequence[Group] = (),
) -> list[GroupChoice]:
    """At most `count` groups in which the deployment's trace fits, best first; with `speed` only
    those on nodes of this speed. `beside`: for the ranks that these groups leave, on nodes like
    theirs.

    Excludes groups in which a member or the newcomer would wait more than its job accepts (PlexRL
    §7.2). Contention is predicted for the best fitting groups only.
    """
    found: list[GroupChoice] = []
    most = max(count, PREDICTIONS_MAX)
    for choice in fitting(
        cluster, deployment, now, strict=strict, count=most, speed=speed, beside=beside
    ):
        groups = [cluster.state.groups[name] for name in (choice.group, *choice.beside)]
        expected = predicted_contention(cluster.capacity, deployment, groups)
        in_all = None if expected is None else in_all_groups(cluster.capacity, groups, expected)
        if not keeps_bounds(cluster, deployment, members_of(groups), in_all):
            continue
        is_whole = sum([len(group.gpus) for group in (*groups, *beside)]) == deployment.spec.workers
        if is_whole or pays(cluster, deployment, groups[0], expected):
            found.append(choice if expected is None else replace(choice, contention=expected.group))
        if len(found) == count:
            break
    return found


def predicted_contention(
    capacity: Capacity, deployment: Deployment, groups: Sequence[Group]
) -> Contention | None:
    """The predicted contention of `deployment`, which comes first, and the members of `groups`, as
    if each used all of them; None if the demand of a member is unknown."""
    state = capacity.state
    if deployment.demand.trace is None:
        return None
    gpus = tuple([gpu for group in groups for gpu in group.gpus])
    own = _resident(state, deployment, deployment.demand.trace, gpus[: deployment.spec.workers])
    others = _residents(state, members_of(groups), gpus)
    return None if others is None else capacity.predictions.of((own, *others))


def in_all_groups(capacity: Capacity, groups: Sequence[Group], expected: Contention) -> Contention:
    """The prediction for `groups`, with what their members wait for on other groups that they are
    on, too: a burst waits for all its groups, and so what it waits for each adds up. That is what
    others than the members of `groups` make it wait for, as far as their demand is known."""
    state, names = capacity.state, members_of(groups)
    here = {group.group for group in groups}
    parts = list(expected.members)
    for at, name in enumerate(names, start=1):
        member = state.deployment(name)
        elsewhere = [
            group
            for group in state.groups_of(member)
            if group.group not in here and not is_colocated(state, group)
        ]
        rivals = [member for member in members_of(elsewhere) if member not in names]
        if not rivals:
            continue
        gpus = tuple([gpu for group in elsewhere for gpu in group.gpus])
        residents = _residents(state, [name, *rivals], gpus)
        if residents is not None:
            waits = capacity.predictions.of(residents).members[0]
            # Of waiting to running, which is the same in both.
            ratio = sum([part / max(1.0 - part, TINY) for part in (parts[at], waits)])
            parts[at] = ratio / (1.0 + ratio)
    return Contention(members=tuple(parts), group=math.fsum(parts) / len(parts))


def _residents(
    state: State, names: Sequence[DeploymentId], gpus: tuple[RankPlacement, ...]
) -> tuple[Resident, ...] | None:
    """Members of groups of these GPUs as residents; None if the demand of one is unknown."""
    found = []
    for name in names:
        member = state.deployment(name)
        if member.placement.reservation is None:
            return None
        # A policy that does not plan by time leaves the reservation as it was made.
        trace = member.placement.reservation.trace or member.demand.trace
        if trace is None:
            return None
        found.append(_resident(state, member, trace, gpus))
    return tuple(found)


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
    beside: Sequence[Group] = (),
) -> list[GroupChoice]:
    """At most `count` groups in which the deployment's trace fits, best first. `beside`: as in
    `nearest`. Of those with equal cost the smaller is first, then the one of fewer groups, then the
    older."""
    trace, gpus = deployment.demand.trace, deployment.spec.workers
    if beside:
        gpus -= sum([len(group.gpus) for group in beside])
    if trace is None:
        return []
    config, larger = cluster.settings.config, cluster.settings.divides_groups
    tables = _tables(cluster, deployment, trace.duty, gpus, speed, beside)
    found_unions = unions(cluster.capacity, deployment, gpus, speed, beside) if larger else []
    if not tables and not found_unions:
        return []
    wanted = ShiftSearch(
        footprint=project(trace, config.horizon_slots, config.period_tolerance),
        start_slot=int(now) % config.horizon_slots,
        margin_slots=math.ceil(trace.jitter_s),
        interference_weight=config.interference_weight,
        strict=strict,
    )
    bound = 0.0 if strict else config.overlap_max * trace.busy_s
    found: list[_Candidate] = []
    for table, rows in tables:
        border_s = BORDER_S if table.gpus > gpus else 0.0
        for fit in _fits_of(cluster, table, rows, wanted, bound, is_part=table.gpus > gpus):
            group = table.groups[fit.row]
            assert group is not None, "the search returned a free row"
            cost = fit.cost + _spill_s(table, fit.row, deployment) + border_s
            found.append(_Candidate(cost, table.gpus, int(table.serial[fit.row]), (group,), fit))
    for union in found_unions:
        names = tuple([group.group for group in union])
        for fit in _fits_of_union(cluster.capacity, union, wanted):
            if fit.overlap_s <= bound:
                serial = min([group.serial for group in union])
                found.append(_Candidate(fit.cost, gpus, serial, names, fit))
    found.sort(key=_order)
    return [
        GroupChoice(
            group=each.names[0],
            beside=each.names[1:],
            mode=PlacementMode.STRICT if each.fit.overlap_s == 0 else PlacementMode.OVERLAP,
            shift_slots=each.fit.shift_slots,
            overlap_s=each.fit.overlap_s,
            interference_s=each.fit.interference_s,
            cost=each.cost,
        )
        for each in found[:count]
    ]


class _Candidate(NamedTuple):
    """A group, or a union, with the best shift there."""

    cost: float
    gpus: int
    serial: int
    names: tuple[GroupId, ...]
    fit: ShiftFit


def _order(each: _Candidate) -> tuple[float, int, int, int, tuple[GroupId, ...]]:
    return each.cost, each.gpus, len(each.names), each.serial, each.names


def _tables(
    cluster: Cluster,
    deployment: Deployment,
    duty: float,
    gpus: int,
    speed: float | None,
    beside: Sequence[Group],
) -> list[tuple[ShapeTable, NDArray[np.intp]]]:
    """The groups of that size, and larger ones of which the deployment may get a part, that have
    capacity for it: rows of tables. Whether a larger one may be divided is not asked yet."""
    index, found = cluster.capacity.inventory.index, list[tuple[ShapeTable, NDArray[np.intp]]]()
    larger = cluster.settings.divides_groups
    for shape in shapes(cluster.capacity, deployment, speed, gpus, or_larger=larger):
        if beside and not is_alike(shape, beside[0]):
            continue
        table = index.table(shape)
        fits_row = can_take(cluster.settings, table, deployment, duty)
        exclude_own(cluster.capacity, shape, deployment, fits_row)
        rows = np.flatnonzero(fits_row)
        if table.gpus > gpus and is_awaited(cluster.queues, table.gpus):
            continue
        for each in beside:
            there = index.row(each.group, shape)
            rows = rows if there is None else rows[rows != there]
        if rows.size:
            found.append((table, rows))
    return found


def _fits_of(
    situation: Situation,
    table: ShapeTable,
    rows: NDArray[np.intp],
    wanted: ShiftSearch,
    bound: float,
    *,
    is_part: bool,
) -> list[ShiftFit]:
    """The fits with at most so much overlap in the first pass that has one. `is_part`: in groups
    that may be divided only."""
    for some in sorted_passes(table, rows, table.load):
        if is_part:
            some = some[[is_divisible(situation, table, row) for row in some.tolist()]]
        fits = [fit for fit in table.search(some, wanted) if fit.overlap_s <= bound]
        if fits:
            return fits
    return []


def _fits_of_union(
    capacity: Capacity, union: Sequence[Group], wanted: ShiftSearch
) -> list[ShiftFit]:
    """The best shift of a union, if it has a fit."""
    profiles = PeriodProfiles(capacity.settings.config.horizon_slots, wanted.footprint.cycles)
    intervals = intervals_of(capacity, union)
    row = np.zeros(1, np.intp)
    profiles.refresh(row, np.ones(1, np.int64), partial(_same, intervals))
    return profiles.search(row, wanted)


def _by_load(
    capacity: Capacity, deployment: Deployment, mode: PlacementMode, speed: float | None
) -> GroupChoice | None:
    duty = capacity.inventory.duty(deployment)
    if deployment.demand.trace is not None:
        duty = deployment.demand.trace.duty
    best: tuple[tuple[float, ...], GroupChoice] | None = None
    for shape in shapes(capacity, deployment, speed):
        table = capacity.inventory.index.table(shape)
        fits_row = can_take(capacity.settings, table, deployment, duty)
        exclude_own(capacity, shape, deployment, fits_row)
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
            group = capacity.state.groups[name]
            if not has_tight_bound(capacity, deployment, group.members):
                best = key, GroupChoice(group=name, mode=mode)
                break
            if deployment.demand.trace is None or not predictions:
                # A demand that is unknown cannot be shown to keep the bound.
                continue
            predictions -= 1
            expected = predicted_contention(capacity, deployment, [group])
            if expected is not None and keeps_bounds(capacity, deployment, group.members, expected):
                best = key, GroupChoice(group=name, mode=mode, contention=expected.group)
                break
    return None if best is None else best[1]


def _by_round(
    capacity: Capacity, deployment: Deployment, speed: float | None
) -> GroupChoice | None:
    """The group whose round takes the deployment at the least cost; the fullest among equals."""
    if deployment.demand.trace is None:
        return None
    best: tuple[tuple[float, ...], GroupChoice] | None = None
    for shape in shapes(capacity, deployment, speed):
        table = capacity.inventory.index.table(shape)
        fits_row = can_take(capacity.settings, table, deployment, deployment.demand.trace.duty)
        fits_row &= table.host_bytes_free >= deployment.spec.state_bytes
        exclude_own(capacity, shape, deployment, fits_row)
        for row in np.flatnonzero(fits_row).tolist():
            group = table.groups[row]
            assert group is not None, "a free row has capacity"
            cost = added_stretch(capacity, capacity.state.groups[group], deployment)
            if cost is None:
                continue
            key = (cost, -float(table.load[row]), float(table.serial[row]))
            if best is None or key < best[0]:
                best = key, GroupChoice(group=group, mode=PlacementMode.CO_EXECUTED, cost=cost)
    return None if best is None else best[1]


def _spanning(cluster: Cluster, deployment: Deployment, now: float) -> GroupChoice | None:
    """The job's own rollouts' groups, and beside them the gaps of another group, or free GPUs."""
    own = own_rollout_groups(cluster.capacity, deployment)
    if not own:
        return None
    first, *others = [group.group for group in own]
    rest = deployment.spec.workers - sum([len(group.gpus) for group in own])
    is_free = (
        cluster.capacity.inventory.find_gpus(deployment, None, rest, beside=own[0]) is not None
    )
    for strict in (True, False):
        if not strict and is_free and not is_scarce(cluster, deployment):
            break
        found = nearest(cluster, deployment, now, strict=strict, count=1, beside=own)
        if found:
            return replace(
                found[0],
                group=first,
                beside=(*others, found[0].group, *found[0].beside),
                mode=PlacementMode.SPANNING,
            )
    if not is_free:
        return None
    return GroupChoice(group=first, beside=tuple(others), mode=PlacementMode.SPANNING)


def pays(
    situation: Situation, deployment: Deployment, group: Group, expected: Contention | None
) -> bool:
    """Whether a deployment that joins a part of a larger group saves more GPUs than it costs: those
    that it needs itself, less its waiting, against all of each member's job that waits for it."""
    if expected is None:
        return False
    state = situation.state
    own, *others = expected.members
    cost = 0.0
    for name, waiting in zip(group.members, others, strict=True):
        member = state.deployments[name]
        before = (
            0.0 if member.placement.record is None else member.placement.record.contention or 0.0
        )
        gpus = sum(
            [
                state.deployments[deployment].spec.workers
                for deployment in state.job(member.job).deployments
            ]
        )
        cost += gpus * max(0.0, waiting - before)
    return cost < deployment.spec.workers * (1.0 - own)


def _spill_s(table: ShapeTable, row: int, deployment: Deployment) -> float:
    state_bytes = deployment.spec.state_bytes * table.gpus // deployment.spec.workers
    over = (
        (state_bytes - max(0, int(table.host_bytes_free[row])))
        * deployment.spec.workers
        / table.gpus
    )
    return max(0.0, over) / SPILL_BYTES_PER_S


def _same(intervals: list[NDArray[np.int64]], row: int) -> list[NDArray[np.int64]]:
    """The intervals of the only row."""
    del row
    return intervals
