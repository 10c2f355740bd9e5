"""The groups that a deployment may join: one of its size, a part of a larger one, or several that
another deployment spans."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plexrl.ids import DeploymentId, GroupId
from plexrl.scheduler.placement.borders import may_divide
from plexrl.scheduler.placement.capacity.index import Shape, ShapeTable
from plexrl.scheduler.placement.capacity.needs import kept_bytes, need_of
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.demand.trace import Footprint
from plexrl.scheduler.state.records import Deployment, Group, State

UNIONS_MAX = 8
"""Most unions of groups that a search looks at."""


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


def members_of(groups: Sequence[Group]) -> list[DeploymentId]:
    """The members of one or several groups, each once."""
    return list(dict.fromkeys([name for group in groups for name in group.members]))


def spanning(state: State) -> list[Deployment]:
    """The members that are on several groups, in the order of their oldest groups."""
    members = map(state.deployment, members_of([*state.groups.values()]))
    return [each for each in members if each.spans]


def exclude_own(
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


def shapes(
    cluster: Cluster,
    deployment: Deployment,
    speed: float | None,
    gpus: int | None = None,
    *,
    or_larger: bool = False,
) -> list[Shape]:
    """The shapes of groups that the deployment could join, of `gpus` GPUs (default: its own number)
    or, with `or_larger`, of more; with `speed` only those on nodes of this speed."""
    need, inventory = need_of(deployment), cluster.inventory
    return [
        shape
        for shape in inventory.index.shapes(
            gpus or deployment.workers, deployment.node_type, or_larger=or_larger
        )
        if shape.gpu_memory_bytes >= need.on(shape.gpu_kind)
        and (speed is None or inventory.speed(shape) == speed)
    ]


def is_alike(shape: Shape, group: Group) -> bool:
    """Whether groups of the shape have GPUs like those of `group`."""
    of_group = group.node_type, group.gpu_memory_bytes, group.gpu_kind
    return (shape.node_type, shape.gpu_memory_bytes, shape.gpu_kind) == of_group


def is_divisible(cluster: Cluster, table: ShapeTable, row: int) -> bool:
    """Whether the group in the row may be divided."""
    group = table.groups[row]
    assert group is not None, "a free row has capacity"
    return may_divide(cluster.state, cluster.state.groups[group])


def is_awaited(cluster: Cluster, gpus: int) -> bool:
    """Whether a deployment that waits may join a whole group of this size, which a border would
    keep from it."""
    return any(
        size.workers == gpus and size.shares
        for sizes in cluster.waiting.table.all_sizes.values
        for size in sizes or ()
    )


def unions(
    cluster: Cluster,
    deployment: Deployment,
    gpus: int,
    speed: float | None,
    beside: Sequence[Group],
) -> list[tuple[Group, ...]]:
    """Groups that have so many GPUs together, because another deployment spans them, and each of
    which can take the deployment; at most `UNIONS_MAX`, the least loaded. Without the groups of
    that one's own rollouts."""
    state, index, settings = cluster.state, cluster.inventory.index, cluster.settings
    trace = deployment.trace
    assert trace is not None, "only a trace can be searched for"
    taken = {*deployment.groups, *[group.group for group in beside]}
    found: dict[tuple[GroupId, ...], tuple[float, tuple[Group, ...]]] = {}
    for member in spanning(state):
        groups = state.groups_of(member)
        union = tuple([each for each in groups if not rolls_out(state, each)])
        names = tuple([each.group for each in union])
        if len(union) < 2 or sum([len(each.gpus) for each in union]) != gpus or names in found:
            continue
        load = 0.0
        for group in union:
            slots = index.slots(group.group)
            is_suited = (
                slots.shape in shapes(cluster, deployment, speed, len(group.gpus))
                and not (beside and not is_alike(slots.shape, beside[0]))
                and group.group not in taken
                and bool(can_take(settings, slots.table, deployment, trace.duty)[slots.row])
            )
            if not is_suited:
                break
            load = max(load, index.load(group.group))
        else:
            found[names] = load, union
    ordered = sorted(found.items(), key=lambda each: (each[1][0], each[1][1][0].serial, each[0]))
    return [union for _, (_, union) in ordered[:UNIONS_MAX]]


def rolls_out(state: State, group: Group) -> bool:
    """Whether a member of the group is a rollout."""
    return any(state.deployments[name].kind == "rollout" for name in group.members)


def footprints_of(cluster: Cluster, union: Sequence[Group]) -> dict[DeploymentId, Footprint]:
    """The footprints of all members of these groups."""
    found: dict[DeploymentId, Footprint] = {}
    for group in union:
        found |= cluster.inventory.index.slots(group.group).footprints
    return found
