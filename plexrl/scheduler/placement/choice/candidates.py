"""The groups that a deployment may join: one of its size, a part of a larger one, or several that
another deployment spans."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.borders import may_divide
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.index import CapacityShape, ShapeTable
from plexrl.scheduler.placement.capacity.needs import kept_bytes, need_of
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.rules.settings import Settings, Situation
from plexrl.scheduler.state.records import Deployment, Group

UNIONS_MAX = 8
"""Most unions of groups that a search looks at."""


def can_take(
    settings: Settings, table: ShapeTable, deployment: Deployment, duty: float
) -> NDArray[np.bool_]:
    """Rows whose group has capacity for one more such member: [rows] bool."""
    # As large as the state of a member on all GPUs of the group would be.
    state_bytes = deployment.spec.state_bytes * table.gpus // deployment.spec.workers
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


def exclude_own(
    capacity: Capacity, shape: CapacityShape, deployment: Deployment, fits_row: NDArray[np.bool_]
) -> None:
    """Exclude the group that the deployment is on, and those of rollouts that generate at the same
    time as this one: those of its job."""
    excluded = list(deployment.placement.groups)
    if deployment.spec.kind == "rollout":
        for name in capacity.state.job(deployment.job).deployments:
            each = capacity.state.deployments[name]
            if each.spec.kind == "rollout" and not each.spec.preemptible:
                excluded += each.placement.groups
    for group in excluded:
        row = capacity.inventory.index.row(group, shape)
        if row is not None:
            fits_row[row] = False


def shapes(
    capacity: Capacity,
    deployment: Deployment,
    speed: float | None,
    gpus: int | None = None,
    *,
    or_larger: bool = False,
) -> list[CapacityShape]:
    """The shapes of groups that the deployment could join, of `gpus` GPUs (default: its own number)
    or, with `or_larger`, of more; with `speed` only those on nodes of this speed."""
    need, inventory = need_of(deployment), capacity.inventory
    return [
        shape
        for shape in inventory.index.shapes(
            gpus or deployment.spec.workers, deployment.spec.node_type, or_larger=or_larger
        )
        if shape.gpu_memory_bytes >= need.on(shape.gpu_kind)
        and (speed is None or inventory.speed(shape) == speed)
    ]


def is_alike(shape: CapacityShape, group: Group) -> bool:
    """Whether groups of the shape have GPUs like those of `group`."""
    of_group = group.node_type, group.gpu_memory_bytes, group.gpu_kind
    return (shape.node_type, shape.gpu_memory_bytes, shape.gpu_kind) == of_group


def is_divisible(situation: Situation, table: ShapeTable, row: int) -> bool:
    """Whether the group in the row may be divided."""
    group = table.groups[row]
    assert group is not None, "a free row has capacity"
    return may_divide(situation.state, situation.state.groups[group])


def is_awaited(queues: Queues, gpus: int) -> bool:
    """Whether a deployment that waits may join a whole group of this size, which a border would
    keep from it."""
    return any(
        size.workers == gpus and size.shares
        for sizes in queues.waiting.table.all_sizes.values
        for size in sizes or ()
    )


def unions(
    capacity: Capacity,
    deployment: Deployment,
    gpus: int,
    speed: float | None,
    beside: Sequence[Group],
) -> list[tuple[Group, ...]]:
    """Groups that have so many GPUs together, because another deployment spans them, and each of
    which can take the deployment; at most `UNIONS_MAX`, the least loaded. Without the groups of
    that one's own rollouts."""
    state, inventory = capacity.state, capacity.inventory
    trace = deployment.demand.trace
    assert trace is not None, "only a trace can be searched for"
    taken = [*deployment.placement.groups, *[group.group for group in beside]]

    def rows_of(shape: CapacityShape) -> NDArray[np.bool_] | None:
        if shape not in shapes(capacity, deployment, speed, shape.gpus) or (
            beside and not is_alike(shape, beside[0])
        ):
            return None
        fits_row = can_take(capacity.settings, inventory.index.table(shape), deployment, trace.duty)
        for name in taken:
            row = inventory.index.row(name, shape)
            if row is not None:
                fits_row[row] = False
        return fits_row

    found = inventory.unions.least_loaded(gpus, rows_of, UNIONS_MAX)
    return [tuple([state.groups[name] for name in names]) for names in found]


def intervals_of(capacity: Capacity, union: Sequence[Group]) -> list[NDArray[np.int64]]:
    """The intervals of the footprints of all members of these groups."""
    found: dict[DeploymentId, NDArray[np.int64]] = {}
    for group in union:
        slots = capacity.inventory.index.slots(group.group)
        found |= {name: slots.intervals_of(name) for name in slots.footprints}
    return list(found.values())
