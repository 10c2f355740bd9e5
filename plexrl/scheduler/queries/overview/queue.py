"""Lists all that waits, page by page: for GPUs in the order of admission, or for a turn on a group.

An order costs a few operations on the columns of the queue's table; a row is explained only if it
is on the page.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.accounting.fair_shares import tenant_share
from plexrl.scheduler.admission.order import admission_key, waiting_ratios
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import why_impossible
from plexrl.scheduler.queries.explain_operation import explain
from plexrl.scheduler.queries.explain_placement import name_for, why_no_gpus
from plexrl.scheduler.queries.overview.gpu_states import can_get_gpus, owner, taking_turns
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.messages.overview_views import QueuedView

GPUS: Final = "gpus"
"""Deployments that wait for GPUs."""
IMPOSSIBLE: Final = "impossible"
"""Those that ask for more than the nodes in service can give."""
TURNS: Final = "turns"
"""Deployments that wait for their turn on GPUs that they share."""

Entry = tuple[int, DeploymentId]
"""Position, from 1, and name. The deployments of a gang have one position."""
Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Order:
    """All that waits in one list, in order."""

    places: Rows
    """[entries]: the row of a unit in the queue's table, or -1 - index in `others`."""
    others: list[DeploymentId]
    """Deployments that are in no unit."""


def page(
    cluster: Cluster, which: str, tenant: TenantId | None, now: float, window: tuple[int, int]
) -> tuple[int, list[Entry]]:
    """(number of entries that the caller may see, the entries of the window, from and to)."""
    order = _ORDERS[which](cluster, now)
    positions = np.flatnonzero(_is_shown(cluster, order, tenant))
    shown = positions[slice(*window)].tolist()
    entries = [
        (at + 1, name) for at in shown for name in _names(cluster, order, int(order.places[at]))
    ]
    return len(positions), entries


def _is_shown(cluster: Cluster, order: _Order, tenant: TenantId | None) -> NDArray[np.bool_]:
    if tenant is None:
        return np.ones(order.places.size, bool)
    table = cluster.queues.waiting.table
    number = table.tenants.number(tenant)
    # What is in no unit has a negative place, of which a table may have too few rows.
    rows = np.maximum(order.places, 0)
    shown = table.tenant[rows] == (-1 if number is None else number)
    for at in np.flatnonzero(order.places < 0).tolist():
        shown[at] = owner(cluster.state, order.others[-1 - int(order.places[at])]) == tenant
    found: NDArray[np.bool_] = shown
    return found


def _names(cluster: Cluster, order: _Order, place: int) -> list[DeploymentId]:
    if place < 0:
        return [order.others[-1 - place]]
    unit = cluster.queues.waiting.table.units[place]
    return [] if unit is None else [member.name for member in unit.members]


def row(cluster: Cluster, entry: Entry, now: float, *, sees_all: bool) -> QueuedView | None:
    """One entry, explained; None: it does not wait any more."""
    position, name = entry
    deployment = cluster.state.deployments.get(name)
    if deployment is None:
        return None
    if name in cluster.queues.waiting:
        return _for_gpus(cluster, deployment, position, now, sees_all)
    if deployment.work.queue and deployment.placement.group is not None:
        operation = cluster.state.operations[deployment.work.queue[0]]
        return _for_turn(cluster, deployment, operation, position, now, sees_all)
    return None


def _by_admission(cluster: Cluster, now: float) -> _Order:
    """All that may get GPUs: first of partial jobs, then by the columns of the table, then gangs
    that are not complete."""
    partial, incomplete = _partial(cluster, now), _incomplete(cluster)
    first = _numbered(0, len(partial))
    last = _numbered(len(partial), len(incomplete))
    rows = _in_table(cluster, now, possible=True)
    return _Order(np.concatenate((first, rows, last)), [*partial, *incomplete])


def _impossible(cluster: Cluster, now: float) -> _Order:
    return _Order(_in_table(cluster, now, possible=False), [])


def _by_submission(cluster: Cluster, now: float) -> _Order:
    """Members that wait for their turn, the longest wait first."""
    del now
    state = cluster.state
    found = [
        (state.operations[each.work.queue[0]].submitted_at, each.deployment)
        for each in taking_turns(state, state.groups.values(), None)
    ]
    return _Order(_numbered(0, len(found)), [name for _, name in sorted(found)])


def _numbered(first: int, count: int) -> Rows:
    return -1 - np.arange(first, first + count, dtype=np.intp)


_ORDERS: Final[dict[str, Callable[[Cluster, float], _Order]]] = {
    GPUS: _by_admission,
    IMPOSSIBLE: _impossible,
    TURNS: _by_submission,
}
LISTS: Final = tuple(_ORDERS)


def _partial(cluster: Cluster, now: float) -> list[DeploymentId]:
    """Deployments of jobs that have GPUs for another deployment."""
    found = []
    for name in cluster.queues.waiting.of_partial_jobs:
        deployment = cluster.state.deployments[name]
        share = tenant_share(cluster.holdings, owner(cluster.state, name), now)
        found.append((admission_key(cluster, deployment, share, now), name))
    return [name for _, name in sorted(found)]


def _incomplete(cluster: Cluster) -> list[DeploymentId]:
    waiting = cluster.queues.waiting
    return [name for name in waiting.in_no_unit() if name not in waiting.of_partial_jobs]


def _in_table(cluster: Cluster, now: float, *, possible: bool) -> Rows:
    """The rows of units that can, or cannot, get GPUs, as `admission.order` sorts them."""
    table = cluster.queues.waiting.table
    rows = np.flatnonzero(table.is_used & (can_get_gpus(cluster) == possible))
    created_at = table.created_at[rows]
    ratios = waiting_ratios(cluster.settings, created_at, table.expected_s[rows], now)
    shares = _shares(cluster, now)[table.tenant[rows]]
    order = np.lexsort((table.serial[rows], created_at, -ratios, shares, -table.priority[rows]))
    ordered: Rows = rows[order]
    return ordered


def _shares(cluster: Cluster, now: float) -> NDArray[np.float64]:
    """The share of each tenant, by its number in the table."""
    tenants = cluster.queues.waiting.table.tenants.values
    return np.array(
        [0.0 if each is None else tenant_share(cluster.holdings, each, now) for each in tenants]
    )


def _for_gpus(
    cluster: Cluster, deployment: Deployment, position: int, now: float, sees_all: bool
) -> QueuedView:
    never = why_impossible(cluster, deployment)
    if never is not None:
        # Also of one that a quota keeps out, too: the list says that it can never start.
        return _view(cluster, deployment, position, never, "impossible")
    reason, rule, eta_s = why_no_gpus(cluster, deployment, now, sees_all=sees_all)
    view = _view(cluster, deployment, position, reason, rule)
    view["eta_s"], view["blocker"] = eta_s, _first_reserved(cluster, deployment, rule, sees_all)
    return view


def _first_reserved(
    cluster: Cluster, deployment: Deployment, rule: str, sees_all: bool
) -> str | None:
    """The owner of the reservation that keeps GPUs from the deployment."""
    reserved = cluster.state.reservations
    if rule != "reservation" or deployment.deployment in reserved:
        return None
    first = min(reserved, key=lambda name: (reserved[name].at, name))
    return name_for(cluster.state, first, deployment, sees_all=sees_all)


def _for_turn(
    cluster: Cluster,
    deployment: Deployment,
    operation: Operation,
    position: int,
    now: float,
    sees_all: bool,
) -> QueuedView | None:
    found = explain(cluster, operation, now, sees_all=sees_all)
    if found is None:
        return None
    view = _view(cluster, deployment, position, found.reason, found.rule)
    view["operation"], view["kind"] = operation.operation, operation.kind.value
    view["since"] = operation.submitted_at
    view["blocker"] = None if found.holder == deployment.deployment else found.holder
    view["eta_s"] = found.eta_s
    view["eta_low_s"], view["eta_high_s"] = found.eta_low_s, found.eta_high_s
    return view


def _view(
    cluster: Cluster, deployment: Deployment, position: int, reason: str, rule: str
) -> QueuedView:
    job = cluster.state.jobs[deployment.job]
    return {
        "position": position,
        "deployment": deployment.deployment,
        "job": job.job,
        "name": job.name,
        "tenant": job.tenant,
        "operation": None,
        "kind": deployment.spec.kind,
        "gpus": deployment.spec.workers,
        "priority": job.priority,
        "since": deployment.created_at,
        "rule": rule,
        "reason": reason,
        "blocker": None,
        "eta_s": None,
        "eta_low_s": None,
        "eta_high_s": None,
    }
