"""Sums per tenant; beyond a limit the smallest tenants are merged. Pure."""

from dataclasses import dataclass

from plexrl.sim.results.result import TenantResult

TENANTS_MAX = 1000
OTHERS = "(others)"
HOUR_S = 3600.0


@dataclass(slots=True, kw_only=True)
class TenantSums:
    """Sums of one tenant so far."""

    tenant: str
    live: int = 0
    """Jobs that are submitted and have not ended."""
    ended: int = 0
    completed: int = 0
    gpu_s: float = 0.0
    rollout_gpu_s: float = 0.0
    wait_s: float = 0.0
    """Total wait of the completed jobs."""
    slowdown: float = 0.0
    """Sum of the slowdowns of the completed jobs."""

    @property
    def slowdown_mean(self) -> float:
        """Mean slowdown; 0 if no job has completed."""
        return self.slowdown / self.completed if self.completed else 0.0

    def merge(self, other: "TenantSums") -> None:
        """Add the sums of `other`."""
        self.ended += other.ended
        self.completed += other.completed
        self.gpu_s += other.gpu_s
        self.rollout_gpu_s += other.rollout_gpu_s
        self.wait_s += other.wait_s
        self.slowdown += other.slowdown

    def result(self) -> TenantResult:
        """The tenant's row of the run's result."""
        return TenantResult(
            tenant=self.tenant,
            jobs=self.ended,
            gpu_hours=self.gpu_s / HOUR_S,
            rollout_gpu_hours=self.rollout_gpu_s / HOUR_S,
            wait_mean_s=self.wait_s / self.completed if self.completed else 0.0,
            slowdown_mean=self.slowdown_mean,
        )


class TenantTable:
    """Sums by tenant.

    Beyond twice `TENANTS_MAX` tenants, the smallest ones without a live job are merged into
    `OTHERS`; a merged tenant that returns counts as a new one.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, TenantSums] = {}
        self._others = TenantSums(tenant=OTHERS)
        self._joined_worst = 0.0
        self._joins_at = 2 * TENANTS_MAX

    def of(self, tenant: str) -> TenantSums:
        """The tenant's sums, which the caller updates."""
        found = self._tenants.get(tenant)
        if found is None:
            if len(self._tenants) >= self._joins_at:
                self._merge_idle()
            found = self._tenants[tenant] = TenantSums(tenant=tenant)
        return found

    def results(self) -> tuple[TenantResult, ...]:
        """Tenants by name; beyond `TENANTS_MAX` the smallest are merged, as the last row."""
        ordered = sorted(self._tenants.values(), key=_size)
        others = TenantSums(tenant=OTHERS)
        others.merge(self._others)
        for each in ordered[TENANTS_MAX:]:
            others.merge(each)
        found = sorted(ordered[:TENANTS_MAX], key=lambda each: each.tenant)
        return tuple(each.result() for each in ([*found, others] if others.ended else found))

    def worst(self) -> float:
        """The greatest of the tenants' mean slowdowns; 1 without tenants.

        It falls when each job of the worst tenant is served sooner, and no gain of others raises
        it. An index of equality, such as Jain's, falls when some tenants gain more than others,
        though nobody loses.
        """
        known = [tenant.slowdown_mean for tenant in self._tenants.values() if tenant.completed]
        return max([self._joined_worst, *known]) or 1.0

    def _merge_idle(self) -> None:
        idle = [tenant for tenant in sorted(self._tenants.values(), key=_size) if not tenant.live]
        for each in idle[TENANTS_MAX:]:
            self._others.merge(each)
            if each.completed:
                self._joined_worst = max(self._joined_worst, each.slowdown_mean)
            del self._tenants[each.tenant]
        # If nearly all tenants have live jobs, the next attempt waits for many new tenants.
        self._joins_at = max(2 * TENANTS_MAX, len(self._tenants) + TENANTS_MAX)


def _size(tenant: TenantSums) -> tuple[float, str]:
    """Sort key: largest GPU time first."""
    return -tenant.gpu_s, tenant.tenant
