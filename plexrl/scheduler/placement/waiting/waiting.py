"""The queue of deployments that wait for GPUs.

A *unit* is a single deployment, or all deployments of a gang (`units`). `table` holds the units; an
admission pass walks over them. `pending_by_tenant` holds all deployments of one tenant and size, to
which the same quotas apply. Two kinds of deployments are in neither: deployments of partial jobs
(`of_partial_jobs`: another deployment of the job has GPUs already), and those of incomplete gangs.

The state determines everything here; `Queues.rebuild` rebuilds it.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from sortedcontainers import SortedList

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.placement.waiting.queue_counts import Position, QueueCounts
from plexrl.scheduler.placement.waiting.unit_table import UnitTable
from plexrl.scheduler.placement.waiting.units import (
    EquivalenceClass,
    Head,
    Member,
    Size,
    Unit,
    UnitOwner,
    expected_length,
    expected_step,
    size_of,
)
from plexrl.scheduler.state.records import Deployment, Job

if TYPE_CHECKING:
    Queue = SortedList[tuple[float, int, DeploymentId]]
    """(creation time, number, name), ascending."""


class Waiting:
    """Deployments without GPUs."""

    def __init__(self) -> None:
        self._units: dict[DeploymentId, Unit | None] = {}
        """The unit of each waiting deployment; None: it is in no unit."""
        self.table = UnitTable()
        self.pending_by_tenant: dict[Size, dict[TenantId, Queue]] = {}
        self.of_partial_jobs: dict[DeploymentId, None] = {}
        self.displaced: dict[DeploymentId, None] = {}
        """Deployments that had GPUs before and may have state on nodes."""
        self.counts = QueueCounts()
        self.by_tenant: dict[TenantId, int] = {}
        """Number of waiting deployments of each tenant."""
        self._tenants: dict[DeploymentId, TenantId] = {}
        self.newcomers: list[DeploymentId] = []
        """Deployments that were created in this event."""
        self.must_retry = False
        """Capacity may have become free: the pass of this event considers all deployments, not only
        the newcomers."""

    def __contains__(self, name: object) -> bool:
        return name in self._units

    def __iter__(self) -> Iterator[DeploymentId]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def clear(self) -> None:
        """Remove all deployments."""
        for part in (
            *(self._units, self.table, self.pending_by_tenant),
            *(self.of_partial_jobs, self.displaced),
            *(self.counts, self.by_tenant, self._tenants),
        ):
            part.clear()

    def retry_all(self) -> None:
        """Consider all deployments before this event ends."""
        self.must_retry = True

    def retry_all_if_any(self) -> None:
        """As `retry_all`, if a deployment waits."""
        if self._units:
            self.must_retry = True

    def take_newcomers(self) -> list[DeploymentId]:
        """Begin a pass: the newcomers are none any more, and no retry is due."""
        newcomers, self.newcomers = self.newcomers, []
        self.must_retry = False
        return newcomers

    def enter(self, deployment: Deployment, job: Job) -> None:
        """Register a waiting deployment, in no unit yet; one that waits already leaves its unit."""
        name = deployment.deployment
        if name in self._units:
            self._take_out(name)
            return
        self._units[name] = None
        if deployment.wpg.processes.incarnation:
            self.displaced[name] = None
        self._tenants[name] = job.tenant
        self.by_tenant[job.tenant] = self.by_tenant.get(job.tenant, 0) + 1
        self.counts.add(
            deployment.spec.node_type,
            Position(-job.priority, deployment.created_at, deployment.serial, name),
        )

    def enqueue_unit(self, deployments: Sequence[Deployment], job: Job, duty: float) -> None:
        """Enqueue waiting deployments as one unit. `duty`: what a single deployment would add to
        the load of a group."""
        for each in deployments:
            self._take_out(each.deployment)
        ordered = sorted(deployments, key=lambda each: (size_of(each), each.serial))
        members = [
            Member(each.created_at, each.serial, each.deployment, size_of(each)) for each in ordered
        ]
        first = min(members)
        demand = tuple(
            (each.spec.state_bytes, each.demand.trace, each.demand.memory) for each in ordered
        )
        needs = (duty, ordered[0].spec.state_bytes) if len(ordered) == 1 else (0.0, 0)
        head = Head(first.created_at, first.serial, first.name, *needs)
        length_s = expected_length(job)
        owner = UnitOwner(job.tenant, job.priority)
        equivalence = EquivalenceClass(owner, expected_step(length_s), length_s, demand, job.slo)
        unit = Unit(head, tuple(member.size for member in members), equivalence, tuple(members))
        for member in members:
            self._units[member.name] = unit
            tenants = self.pending_by_tenant.setdefault(member.size, {})
            tenants.setdefault(job.tenant, SortedList()).add(member[:3])
        self.table.add(unit)

    def change_demand(self, deployment: Deployment, duty: float) -> None:
        """The trace of a waiting deployment has changed: its unit keeps its place."""
        unit = self._units[deployment.deployment]
        if unit is None:
            return
        index = [member.name for member in unit.members].index(deployment.deployment)
        demand = list(unit.equivalence.demand)
        state_bytes, _, memory = demand[index]
        demand[index] = (state_bytes, deployment.demand.trace, memory)
        head = unit.head._replace(duty=duty) if len(unit.members) == 1 else unit.head
        equivalence = unit.equivalence._replace(demand=tuple(demand))
        changed = unit._replace(head=head, equivalence=equivalence)
        for member in unit.members:
            self._units[member.name] = changed
        self.table.replace(changed)

    def mark_partial(self, name: DeploymentId) -> None:
        """Take a deployment out of its unit, because its job has got GPUs; it still waits."""
        self._take_out(name)
        self.of_partial_jobs[name] = None

    def remove(self, name: DeploymentId) -> None:
        """Remove a deployment that has got GPUs or whose job has ended."""
        if name in self._units:
            self._take_out(name)
            del self._units[name]
            self.displaced.pop(name, None)
            self.counts.remove(name)
            tenant = self._tenants.pop(name)
            self.by_tenant[tenant] -= 1
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]

    def kinds(self) -> Iterator[tuple[Unit, int]]:
        """A unit of each kind of interchangeable ones, and how many of these there are."""
        table = self.table
        rows = np.flatnonzero(table.is_used)
        _, firsts, counts = np.unique(table.kind[rows], return_index=True, return_counts=True)
        for row, count in zip(rows[firsts].tolist(), counts.tolist(), strict=True):
            unit = table.units[row]
            assert unit is not None, "a used row has a unit"
            yield unit, count

    def in_no_unit(self) -> list[DeploymentId]:
        """The deployments of partial jobs and of incomplete gangs."""
        return [name for name, unit in self._units.items() if unit is None]

    def unit_of(self, name: DeploymentId) -> Unit | None:
        """The unit of a waiting deployment; None: it is in none."""
        return self._units[name]

    def check(self) -> None:
        """Assert that the table has exactly the units."""
        units = {unit.head.name: unit for unit in self._units.values() if unit is not None}
        held = [unit for unit in self.table.units if unit is not None]
        assert {unit.head.name: unit for unit in held} == units, "the table lacks units"
        assert len(held) == len(units) == len(self.table) == int(self.table.is_used.sum())
        for name, unit in units.items():
            row = self.table.row(name)
            found = self.table.units[row], self.table.all_sizes.values[self.table.sizes[row]]
            assert found == (unit, unit.sizes), f"the row of {name} is wrong"
        assert len(self.counts) == len(self._units), "some waiting deployments are not counted"

    def _take_out(self, name: DeploymentId) -> None:
        """Remove a deployment and the rest of its gang from the units."""
        self.of_partial_jobs.pop(name, None)
        unit = self._units[name]
        if unit is None:
            return
        self.table.remove(unit.head.name)
        tenant = unit.equivalence.owner.tenant
        for member in unit.members:
            self._units[member.name] = None
            tenants = self.pending_by_tenant[member.size]
            pending = tenants[tenant]
            pending.remove(member[:3])
            if not pending:
                del tenants[tenant]
                if not tenants:
                    del self.pending_by_tenant[member.size]
