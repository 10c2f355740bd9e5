"""Totals of the cluster, from all its jobs, in steps: `plexrl status`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.accounting.profiler import measured_waiting_part
from plexrl.scheduler.operations.held.holding import held_view
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.contention.service_level import waiting_bound
from plexrl.scheduler.placement.fit.feasibility import count_impossible
from plexrl.scheduler.queries.eta import eta_quality
from plexrl.scheduler.rules.config import planning
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.records import Job, State
from plexrl.wire.messages.cluster_views import ClusterTotals, ClusterView, HeldView

JOBS_PER_STEP: Final = 500
"""A step over so many jobs takes about a millisecond."""


class TotalsReader:
    """One reading of the jobs that were there when it began: all `steps`, then `view`."""

    def __init__(self, state: State, tenant: TenantId | None) -> None:
        """For a tenant, only its jobs and operations are counted."""
        self._tenant = tenant
        self._names = list(state.jobs)
        self._jobs = self._live = self._ran = self._pending = self._over_slo = 0
        self._held: list[HeldView] = []

    def steps(self, cluster: Callable[[], Cluster]) -> Iterator[None]:
        """Read; `cluster` returns the present one. Between two steps jobs may be dropped."""
        for at in range(0, len(self._names), JOBS_PER_STEP):
            now_there = cluster()
            for name in self._names[at : at + JOBS_PER_STEP]:
                job = now_there.state.jobs.get(name)
                if job is not None and self._tenant in (None, job.tenant):
                    self._add(now_there, job)
            yield

    def view(self, cluster: Cluster, now: float) -> ClusterView:
        """What was read, and what needs no look at the jobs."""
        state, tenant = cluster.state, self._tenant
        nodes = [node for node in state.nodes.values() if node.alive]
        forgotten = [counts for name, counts in state.forgotten.items() if tenant in (None, name)]
        by_tenant = cluster.queues.waiting.by_tenant
        waiting = len(cluster.queues.waiting) if tenant is None else by_tenant.get(tenant, 0)
        return {
            "now": now,
            "nodes": len(nodes),
            "gpus": sum(node.gpus for node in nodes),
            "gpus_reserved": sum(len(group.gpus) for group in state.groups.values()),
            "routers": len(state.routers),
            **self._totals(state),
            "jobs_live": self._live,
            "jobs_total": self._jobs + sum(counts.jobs for counts in forgotten),
            "deployments_waiting": waiting,
            "deployments_impossible": count_impossible(cluster, tenant),
            "deployments_over_slo": self._over_slo,
            "operations_pending": self._pending,
            "held": self._held,
            "eta_quality": eta_quality(state.eta_errors),
            "planning": planning(cluster.settings.config),
        }

    def _add(self, cluster: Cluster, job: Job) -> None:
        self._jobs += 1
        if self._tenant is not None:
            # Operations that ran: cancelled ones have no usage row.
            self._ran += sum(row.operations for row in job.usage.values())
        if job.state.is_final:
            return
        deployments = cluster.state.deployments
        self._live += 1
        self._pending += sum(len(deployments[name].work.queue) for name in job.deployments)
        self._over_slo += _count_over_slo(cluster, job.deployments)
        self._held += held_view(cluster.state, job.deployments, sees_all=self._tenant is None)

    def _totals(self, state: State) -> ClusterTotals:
        tenant = self._tenant
        if tenant is None:
            switches = sum(group.switches for group in state.groups.values())
            return {
                "tenants": len(state.tenants),
                "operations_finished": state.finished_count,
                "context_switches": state.former_switches + switches,
            }
        forgotten = state.forgotten.get(tenant)
        return {"operations_finished": self._ran + (forgotten.operations if forgotten else 0)}


def cluster_totals(cluster: Cluster, tenant: TenantId | None, now: float) -> ClusterView:
    """The totals, read at once."""
    reader = TotalsReader(cluster.state, tenant)
    for _ in reader.steps(lambda: cluster):
        pass
    return reader.view(cluster, now)


def _count_over_slo(situation: Situation, names: Iterable[DeploymentId]) -> int:
    count = 0
    for name in names:
        deployment = situation.state.deployments[name]
        part = measured_waiting_part(deployment)
        if part is not None and part > waiting_bound(situation, deployment):
            count += 1
    return count
