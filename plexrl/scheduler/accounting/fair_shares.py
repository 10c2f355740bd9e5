"""The tenants' shares of the cluster: the tenant with the least share gets GPUs next.

A share is (GPU-seconds held, decayed with half-life `HALF_LIFE_S`, plus GPUs held now times
`HELD_NOW_S`) divided by the tenant's weight. While all tenants have a backlog, each gets
GPU-seconds in proportion to its weight, for jobs much shorter than the half-life. The second term
distributes GPUs that become free at the same time.

A tenant that starts to wait after `PAUSE_S` or more without waiting jobs, and whose share is lower
than the least share among the tenants that wait or hold GPUs, is raised to that share. So no tenant
saves up shares while it has nothing to run, and none pays later for GPUs that no other wanted.
"""

from typing import TYPE_CHECKING

from plexrl.scheduler.accounting.holdings import held_until, settle
from plexrl.scheduler.state.records import HeldTime

if TYPE_CHECKING:
    from collections.abc import Collection

    from plexrl.ids import TenantId
    from plexrl.scheduler.accounting.holdings import Holdings
    from plexrl.scheduler.state.records import State

HELD_NOW_S = 3600.0
"""GPUs held at present count as if held for this long. Far below the half-life, because with few
large jobs the GPUs held at one moment may always be far from the tenant's share."""

PAUSE_S = 3600.0
"""A backlog that was empty for less time than this counts as uninterrupted."""


def begin_to_wait(
    holdings: "Holdings", waiting: "Collection[TenantId]", name: "TenantId", now: float
) -> None:
    """Update the share of a tenant before one of its deployments starts to wait. `waiting`: the
    tenants that wait for GPUs."""
    held = holdings.state.held.get(name)
    if held is None:
        held = holdings.state.held[name] = HeldTime(at=now)
    waited_at, held.waited_at = held.waited_at, now
    if name in waiting:
        return
    if waited_at is not None and now - waited_at < PAUSE_S:
        return
    others = [
        decayed_use(holdings, other, now)
        for other in dict.fromkeys((*waiting, *holdings.holders()))
        if other != name
    ]
    if not others:
        return
    gpus, _ = holdings.of(name)
    settle(held, gpus, now)
    held.gpu_seconds = max(held.gpu_seconds, min(others) * weight_of(holdings.state, name))


def tenant_share(holdings: "Holdings", name: "TenantId", now: float) -> float:
    """The tenant's share, in GPU-hours per weight."""
    gpus, _ = holdings.of(name)
    return decayed_use(holdings, name, now) / HELD_NOW_S + gpus / weight_of(holdings.state, name)


def decayed_use(holdings: "Holdings", name: "TenantId", now: float) -> float:
    """GPU-seconds that the tenant held, decayed, divided by its weight."""
    held = holdings.state.held.get(name)
    if held is None:
        return 0.0
    gpus, _ = holdings.of(name)
    return held_until(held, gpus, now) / weight_of(holdings.state, name)


def weight_of(state: "State", name: "TenantId") -> float:
    """The tenant's weight; 1 by default."""
    tenant = state.tenants.get(name)
    return 1.0 if tenant is None else tenant.weight
