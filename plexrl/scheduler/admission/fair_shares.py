"""The tenants' shares of the cluster: the tenant with the least share gets GPUs next.

A share is (GPU-seconds held, decayed with half-life `HALF_LIFE_S`, plus GPUs held now times
`HELD_NOW_S`) divided by the tenant's weight. While all tenants have a backlog, each gets
GPU-seconds in proportion to its weight, for jobs much shorter than the half-life. The second term
distributes GPUs that become free at the same time.

A tenant that starts to wait after `PAUSE_S` or more without waiting jobs, and whose share is lower
than the least share among the tenants that wait or hold GPUs, is raised to that share. So no tenant
saves up shares while it has nothing to run, and none pays later for GPUs that no other wanted.
"""

import math
from typing import TYPE_CHECKING

from plexrl.scheduler.state.records import HeldTime

if TYPE_CHECKING:
    from plexrl.ids import TenantId
    from plexrl.scheduler.context.cluster import Cluster
    from plexrl.scheduler.state.records import State

HALF_LIFE_S = 7 * 86_400.0
"""As in Slurm's fair share: long compared with jobs, so that one job still counts when the next one
is admitted."""

HELD_NOW_S = 3600.0
"""GPUs held at present count as if held for this long. Far below the half-life, because with few
large jobs the GPUs held at one moment may always be far from the tenant's share."""

PAUSE_S = 3600.0
"""A backlog that was empty for less time than this counts as uninterrupted."""

_DECAY_S = HALF_LIFE_S / math.log(2.0)


def settle(held: HeldTime, gpus: int, now: float) -> None:
    """Add the GPU-seconds of `gpus` GPUs held since the last call."""
    held.gpu_seconds = _until(held, gpus, now)
    held.at = now


def begin_to_wait(cluster: "Cluster", name: "TenantId", now: float) -> None:
    """Update the share of a tenant before one of its deployments starts to wait."""
    held = cluster.state.held.get(name)
    if held is None:
        held = cluster.state.held[name] = HeldTime(at=now)
    waited_at, held.waited_at = held.waited_at, now
    if name in cluster.waiting.by_tenant:
        return
    if waited_at is not None and now - waited_at < PAUSE_S:
        return
    others = [
        decayed_use(cluster, other, now) for other in cluster.active_tenants() if other != name
    ]
    if not others:
        return
    gpus, _ = cluster.holdings(name)
    settle(held, gpus, now)
    held.gpu_seconds = max(held.gpu_seconds, min(others) * weight_of(cluster.state, name))


def tenant_share(cluster: "Cluster", name: "TenantId", now: float) -> float:
    """The tenant's share, in GPU-hours per weight."""
    gpus, _ = cluster.holdings(name)
    return decayed_use(cluster, name, now) / HELD_NOW_S + gpus / weight_of(cluster.state, name)


def decayed_use(cluster: "Cluster", name: "TenantId", now: float) -> float:
    """GPU-seconds that the tenant held, decayed, divided by its weight."""
    held = cluster.state.held.get(name)
    if held is None:
        return 0.0
    gpus, _ = cluster.holdings(name)
    return _until(held, gpus, now) / weight_of(cluster.state, name)


def weight_of(state: "State", name: "TenantId") -> float:
    """The tenant's weight; 1 by default."""
    tenant = state.tenants.get(name)
    return 1.0 if tenant is None else tenant.weight


def _until(held: HeldTime, gpus: int, now: float) -> float:
    passed_s = max(0.0, now - held.at)
    decay = math.exp(-passed_s / _DECAY_S)
    return held.gpu_seconds * decay - gpus * _DECAY_S * math.expm1(-passed_s / _DECAY_S)
