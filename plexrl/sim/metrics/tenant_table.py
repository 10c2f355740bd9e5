"""What each tenant got, as sums; with very many tenants the smallest are told together. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from plexrl.sim.results.result import TenantResult

TENANTS_MAX = 1000
OTHERS = "(others)"
HOUR_S = 3600.0


@dataclass(slots=True, kw_only=True)
class TenantSums:
    """One tenant so far."""

    tenant: str
    live: int = 0
    """Jobs submitted and not ended."""
    ended: int = 0
    completed: int = 0
    gpu_s: float = 0.0
    rollout_gpu_s: float = 0.0
    wait_s: float = 0.0
    """Of all jobs that completed."""
    slowdown: float = 0.0
    """Sum over jobs that completed."""

    @property
    def slowdown_mean(self) -> float:
        """0 where no job has completed."""
        return self.slowdown / self.completed if self.completed else 0.0

    def take_in(self, other: "TenantSums") -> None:
        """Count what `other` had to this one."""
        self.ended += other.ended
        self.completed += other.completed
        self.gpu_s += other.gpu_s
        self.rollout_gpu_s += other.rollout_gpu_s
        self.wait_s += other.wait_s
        self.slowdown += other.slowdown

    def result(self) -> TenantResult:
        """As the run's result tells it."""
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

    Beyond twice `TENANTS_MAX` those that used least and have no job now are joined into `OTHERS`;
    one that comes back later counts as another one.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, TenantSums] = {}
        self._others = TenantSums(tenant=OTHERS)
        self._joined = JainIndex()
        self._joins_at = 2 * TENANTS_MAX

    def of(self, tenant: str) -> TenantSums:
        """Its sums, to be added to."""
        found = self._tenants.get(tenant)
        if found is None:
            if len(self._tenants) >= self._joins_at:
                self._join()
            found = self._tenants[tenant] = TenantSums(tenant=tenant)
        return found

    def results(self) -> tuple[TenantResult, ...]:
        """By name; the smallest together, last, where there are more than `TENANTS_MAX`."""
        ordered = sorted(self._tenants.values(), key=_size)
        others = TenantSums(tenant=OTHERS)
        others.take_in(self._others)
        for each in ordered[TENANTS_MAX:]:
            others.take_in(each)
        found = sorted(ordered[:TENANTS_MAX], key=lambda each: each.tenant)
        return tuple(each.result() for each in ([*found, others] if others.ended else found))

    def fairness(self) -> float:
        """Jain's index over tenants' mean slowdowns; 1 where there are none."""
        index = JainIndex()
        index.take_in(self._joined)
        index.add(each.slowdown_mean for each in self._tenants.values() if each.completed)
        return index.value

    def _join(self) -> None:
        idle = [each for each in sorted(self._tenants.values(), key=_size) if not each.live]
        for each in idle[TENANTS_MAX:]:
            self._others.take_in(each)
            if each.completed:
                self._joined.add([each.slowdown_mean])
            del self._tenants[each.tenant]
        # Where nearly all have jobs, it is not tried again at every newcomer.
        self._joins_at = max(2 * TENANTS_MAX, len(self._tenants) + TENANTS_MAX)


class JainIndex:
    """(Σx)² / (n Σx²): 1 where all have the same, 1/n where one has all."""

    def __init__(self) -> None:
        self._count = 0
        self._total = 0.0
        self._squares = 0.0

    def add(self, values: Iterable[float]) -> None:
        """Of one who takes part, each."""
        for value in values:
            self._count += 1
            self._total += value
            self._squares += value * value

    def take_in(self, other: "JainIndex") -> None:
        """Count those of `other`."""
        self._count += other._count
        self._total += other._total
        self._squares += other._squares

    @property
    def value(self) -> float:
        """The index; 1 where nobody takes part or nobody has anything."""
        return self._total**2 / (self._count * self._squares) if self._squares else 1.0


def _size(tenant: TenantSums) -> tuple[float, str]:
    """Busiest first."""
    return -tenant.gpu_s, tenant.tenant
