"""Which tenant has had the least of the cluster for its weight, and so gets GPUs next.

A tenant's share is (GPU-seconds that it held, fading with `HALF_LIFE_S`, plus the GPUs that it
holds now times `HELD_NOW_S`) over its weight. The least share goes first. Over open backlogs this
gives each tenant GPU-seconds in proportion to its weight, for jobs much shorter than the half-life;
the second term spreads GPUs that come free at the same time.

A tenant that begins to wait, and had nothing waiting for `PAUSE_S`, is put on a level with the
least share among the tenants that wait or hold GPUs, if its own is lower. So nobody saves up shares
while it has nothing to run, and nobody pays later for GPUs that no one else wanted.
"""

import math
from typing import TYPE_CHECKING

from plexrl.scheduler.state.records import HeldTime

if TYPE_CHECKING:
    from plexrl.ids import TenantId
    from plexrl.scheduler.core.context import Context

HALF_LIFE_S = 7 * 86_400.0
"""As Slurm's fair share has it: long beside jobs, or the order of jobs would be forgotten before
the next one is chosen."""

HELD_NOW_S = 3600.0
"""GPUs held now count as much as if they had been held for this long. Far below the half-life: what
is held at one moment may be far from a tenant's part for good, where jobs are few and large."""

PAUSE_S = 3600.0
"""A backlog that is empty for less time than this counts as one that stayed open."""

_FADE_S = HALF_LIFE_S / math.log(2.0)


def settle(held: HeldTime, gpus: int, now: float) -> None:
    """Count the `gpus` that were held since the last call."""
    held.gpu_seconds = _until(held, gpus, now)
    held.at = now


def begin_to_wait(context: "Context", name: "TenantId", now: float) -> None:
    """A deployment of the tenant is about to wait for GPUs."""
    held = context.state.held.get(name)
    if held is None:
        held = context.state.held[name] = HeldTime(at=now)
    waited_at, held.waited_at = held.waited_at, now
    if name in context.waiting.by_tenant:
        return
    if waited_at is not None and now - waited_at < PAUSE_S:
        return
    others = [use_of(context, other, now) for other in context.active_tenants() if other != name]
    if not others:
        return
    gpus, _ = context.holdings(name)
    settle(held, gpus, now)
    held.gpu_seconds = max(held.gpu_seconds, min(others) * weight_of(context, name))


def tenant_share(context: "Context", name: "TenantId", now: float) -> float:
    """GPU-hours that the tenant held, fading, and GPUs that it holds, over its weight."""
    gpus, _ = context.holdings(name)
    return use_of(context, name, now) / HELD_NOW_S + gpus / weight_of(context, name)


def use_of(context: "Context", name: "TenantId", now: float) -> float:
    """GPU-seconds that the tenant held, fading, over its weight."""
    held = context.state.held.get(name)
    if held is None:
        return 0.0
    gpus, _ = context.holdings(name)
    return _until(held, gpus, now) / weight_of(context, name)


def weight_of(context: "Context", name: "TenantId") -> float:
    """The tenant's weight; 1 where it has none."""
    tenant = context.state.tenants.get(name)
    return 1.0 if tenant is None else tenant.weight


def _until(held: HeldTime, gpus: int, now: float) -> float:
    passed_s = max(0.0, now - held.at)
    faded = math.exp(-passed_s / _FADE_S)
    return held.gpu_seconds * faded - gpus * _FADE_S * math.expm1(-passed_s / _FADE_S)
