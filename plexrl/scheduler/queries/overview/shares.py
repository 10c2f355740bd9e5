"""Tenants' shares beside their weights, their quotas and what they paid."""

from collections.abc import Iterable

from plexrl.ids import TenantId
from plexrl.scheduler.accounting.quotas import limits_of
from plexrl.scheduler.accounting.tenants import live_jobs_bound
from plexrl.scheduler.accounting.usage import used_gpu_seconds
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.state.records import Job
from plexrl.scheduler.state.tenant import Tenant
from plexrl.wire.messages.cluster_views import SharingView
from plexrl.wire.messages.overview_views import TenantShareView
from plexrl.wire.operations import MOVES


class _Bill:
    """Sums over a tenant's remembered jobs."""

    __slots__ = ("failed", "gpu_seconds", "operations", "saved_gpu_seconds", "switch_gpu_seconds")

    def __init__(self) -> None:
        self.gpu_seconds = self.switch_gpu_seconds = self.saved_gpu_seconds = 0.0
        self.operations = self.failed = 0


class Bills:
    """Sums of the tenants' jobs; each job is added once."""

    def __init__(self) -> None:
        self._by_tenant: dict[TenantId, _Bill] = {}

    def add(self, jobs: Iterable[Job]) -> None:
        """Add what these jobs used."""
        for job in jobs:
            if not job.usage:
                continue
            bill = self._of(job.tenant)
            for kind, used in job.usage.items():
                bill.operations += used.operations
                bill.failed += used.failed
                bill.gpu_seconds += used.gpu_seconds
                if kind.value in MOVES:
                    bill.switch_gpu_seconds += used.gpu_seconds

    def add_savings(self, rows: Iterable[SharingView]) -> None:
        """Add what sharing saved."""
        for each in rows:
            self._of(each["tenant"]).saved_gpu_seconds += each["saved_gpu_seconds"]

    def views(self, cluster: Cluster, tenant: TenantId | None, now: float) -> list[TenantShareView]:
        """Each tenant that has jobs, or had some, or has a quota; most GPU time first."""
        tenants = cluster.state.tenants.values()
        shown = [each for each in tenants if tenant in (None, each.tenant)]
        weights = sum(
            each.weight for each in tenants if cluster.holdings.live_jobs.get(each.tenant)
        )
        held = sum(cluster.holdings.of(each.tenant)[0] for each in tenants)
        rows = [self._view(cluster, each, weights, held, now) for each in shown]
        rows.sort(key=lambda each: (-each["gpu_seconds"], each["tenant"]))
        return rows

    def _of(self, tenant: TenantId) -> _Bill:
        return self._by_tenant.setdefault(tenant, _Bill())

    def _view(
        self, cluster: Cluster, tenant: Tenant, weights: float, held: int, now: float
    ) -> TenantShareView:
        bill, limits = self._by_tenant.get(tenant.tenant, _Bill()), limits_of(tenant)
        gpus, jobs = cluster.holdings.of(tenant.tenant)
        live = cluster.holdings.live_jobs.get(tenant.tenant, 0)
        return {
            "tenant": tenant.tenant,
            "weight": tenant.weight,
            "due": tenant.weight / weights if live and weights else 0.0,
            "held": gpus / held if held else 0.0,
            "gpus_held": gpus,
            "gpus_max": limits["gpus_max"],
            "jobs_running": jobs,
            "jobs_max": limits["jobs_max"],
            "live_jobs": live,
            "live_jobs_max": live_jobs_bound(cluster.settings, tenant),
            "gpu_seconds": used_gpu_seconds(cluster.holdings, tenant.tenant, now),
            "gpu_seconds_max": limits["gpu_seconds_max"],
            "remembered_gpu_seconds": bill.gpu_seconds,
            "switch_gpu_seconds": bill.switch_gpu_seconds,
            "saved_gpu_seconds": bill.saved_gpu_seconds,
            "operations": bill.operations,
            "failed": bill.failed,
        }
