"""The queues of deployments that wait for GPUs. One admission pass looks at the heads only.

A backlog holds many deployments of few kinds. If the first of a kind does not fit, no other of the
kind fits, so the cost of a pass grows with the number of kinds instead of the backlog. A *unit* is
a single deployment, or all deployments of a gang, which get GPUs at once. Its *sizes* are the sizes
of its deployments. A unit is in three structures:

* a *queue* of interchangeable units: same tenant, priority, expected length, sizes and demand. All
  of them fit, or none. Earlier creation goes first;
* `heads`: queue heads, grouped by sizes, tenant, priority, expected length and whether profiled.
  Earlier creation goes first here too; an index finds the first head that may fit;
* `blocking_requests`: all units of one tenant, priority and length with the same sizes. The first
  one stands for all when it blocks deployments behind it.

`head_sizes` and `blocking_sizes` list the sizes in the last two by priority and owner, so that a
pass touches only the owners that it reaches.

`pending_by_tenant` holds all deployments of one tenant and size, to which the same quotas apply.
Two kinds of deployments are in no queue: deployments of partial jobs (`of_partial_jobs`: another
deployment of the job has GPUs already), and deployments of incomplete gangs.

The state determines everything here; `Cluster.reconfigure` rebuilds it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from sortedcontainers import SortedList

from plexrl.ids import DeploymentId, TenantId
from plexrl.model.memory.device_memory import DeviceMemory
from plexrl.scheduler.placement.waiting.queue_counts import Position, QueueCounts
from plexrl.scheduler.placement.waiting.queue_heads import Head, QueueHeadIndex
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.records import Deployment, Job


class Size(NamedTuple):
    """The GPUs that a deployment requests."""

    node_type: str
    workers: int
    shares: bool
    """Whether others may be on the same group."""


Sizes = tuple[Size, ...]
"""The sizes of a unit, ascending."""


class Owner(NamedTuple):
    """Tenant and priority class, which together determine the first criteria of the order."""

    tenant: TenantId
    priority: int


class EquivalenceClass(NamedTuple):
    """What the units of one queue have in common, in addition to their sizes."""

    owner: Owner
    expected_s: float
    """Expected length, rounded by `expected_step`."""
    lasts_s: float
    """Expected length: it decides whether a unit may pass a reservation."""
    demand: tuple[tuple[int, DemandTrace | None, DeviceMemory | None], ...]
    """(state bytes, trace, memory on a GPU) of each deployment, in the order of the sizes."""
    slo: float | None
    """How long the job may wait in a group decides which groups it may join."""


class QueueKey(NamedTuple):
    """What the heads of one index have in common, in addition to sizes and owner."""

    expected_s: float
    has_profile: bool


class Member(NamedTuple):
    """One deployment of a unit."""

    created_at: float
    serial: int
    name: DeploymentId
    size: Size


class Unit(NamedTuple):
    """A unit and its position in the queues."""

    head: Head
    sizes: Sizes
    equivalence: EquivalenceClass
    members: tuple["Member", ...]
    """The oldest member decides the unit's position."""

    @property
    def owner(self) -> Owner:
        return self.equivalence.owner

    @property
    def queue_key(self) -> QueueKey:
        has_profile = any(trace is not None for _, trace, _ in self.equivalence.demand)
        return QueueKey(self.equivalence.expected_s, has_profile)


if TYPE_CHECKING:
    Queue = SortedList[tuple[float, int, DeploymentId]]
    """(creation time, number, name), ascending."""

KeyT = TypeVar("KeyT", QueueKey, float)
ValueT = TypeVar("ValueT")

JOB_S = 3600.0
"""Expected length of a job without a declared length."""

_STEPS: Final = (4, 22)
"""Smallest and largest power of two of an expected length: 16 s and 48 days."""


def expected_step(expected_s: float) -> float:
    """The expected length rounded down to a power of two, which keeps the indexes of heads few."""
    _, exponent = math.frexp(expected_s or JOB_S)
    return 2.0 ** min(max(exponent - 1, _STEPS[0]), _STEPS[1])


def size_of(deployment: Deployment) -> Size:
    """The GPUs that one deployment requests."""
    return Size(deployment.node_type, deployment.workers, deployment.shares)


class SizesByOwner:
    """The sizes for which each owner has an entry in a table, by priority."""

    def __init__(self) -> None:
        self.priorities: dict[int, dict[Owner, dict[Sizes, None]]] = {}

    def add(self, sizes: Sizes, owner: Owner) -> None:
        """Note that the owner has an entry for these sizes."""
        owners = self.priorities.setdefault(owner.priority, {})
        owners.setdefault(owner, {})[sizes] = None

    def discard(self, sizes: Sizes, owner: Owner) -> None:
        """Note that the owner's entry for these sizes is gone."""
        owners = self.priorities[owner.priority]
        del owners[owner][sizes]
        if not owners[owner]:
            del owners[owner]
            if not owners:
                del self.priorities[owner.priority]

    def of(self, owner: Owner) -> list[Sizes]:
        """The sizes of one owner."""
        return list(self.priorities.get(owner.priority, {}).get(owner, ()))

    def clear(self) -> None:
        """Remove everything."""
        self.priorities.clear()


class Waiting:
    """Deployments without GPUs."""

    def __init__(self) -> None:
        self._units: dict[DeploymentId, Unit | None] = {}
        """The unit of each waiting deployment; None: in no queue."""
        self._queues: dict[Sizes, dict[EquivalenceClass, Queue]] = {}
        self.heads: dict[Sizes, dict[Owner, dict[QueueKey, QueueHeadIndex]]] = {}
        self._demands: dict[Sizes, tuple[SortedList[float], SortedList[int]]] = {}
        """(duties, state bytes) of the heads of these sizes."""
        self.blocking_requests: dict[Sizes, dict[Owner, dict[float, Queue]]] = {}
        self.head_sizes = SizesByOwner()
        self.blocking_sizes = SizesByOwner()
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
        self.must_continue = False
        """The interrupted pass is to go on in this event."""
        self.has_changed = False
        """Deployments entered or left the queues since the pass was interrupted."""

    def __contains__(self, name: object) -> bool:
        return name in self._units

    def __iter__(self) -> Iterator[DeploymentId]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def clear(self) -> None:
        """Remove all deployments."""
        for part in (
            *(self._units, self._queues, self.heads, self._demands),
            *(self.blocking_requests, self.head_sizes, self.blocking_sizes),
            self.pending_by_tenant,
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
        self.must_retry = self.must_continue = False
        return newcomers

    def enter(self, deployment: Deployment, job: Job) -> None:
        """Register a waiting deployment, in no queue yet. If it waits already, it leaves its
        queues."""
        name = deployment.deployment
        self.has_changed = True
        if name in self._units:
            self._take_out(name)
            return
        self._units[name] = None
        if deployment.processes.incarnation:
            self.displaced[name] = None
        self._tenants[name] = job.tenant
        self.by_tenant[job.tenant] = self.by_tenant.get(job.tenant, 0) + 1
        self.counts.add(
            deployment.node_type,
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
        demand = tuple((each.state_bytes, each.trace, each.memory) for each in ordered)
        needs = (duty, ordered[0].state_bytes) if len(ordered) == 1 else (0.0, 0)
        head = Head(first.created_at, first.serial, first.name, *needs)
        owner = Owner(job.tenant, job.priority)
        equivalence = EquivalenceClass(
            owner, expected_step(job.expected_s), job.expected_s, demand, job.slo
        )
        unit = Unit(head, tuple(each.size for each in members), equivalence, tuple(members))
        for member in members:
            self._units[member.name] = unit
            tenants = self.pending_by_tenant.setdefault(member.size, {})
            tenants.setdefault(job.tenant, SortedList()).add(member[:3])
        entry = head[:3]
        queue = self._queues.setdefault(unit.sizes, {}).setdefault(unit.equivalence, SortedList())
        before = queue[0][2] if queue else None
        queue.add(entry)
        if queue[0][2] == head.name:
            heads = self._heads(unit)
            if before is not None:
                self._drop_head(heads, self._unit(before))
            self._add_head(heads, unit)
        requests = self.blocking_requests.setdefault(unit.sizes, {}).setdefault(owner, {})
        self.blocking_sizes.add(unit.sizes, owner)
        requests.setdefault(unit.equivalence.expected_s, SortedList()).add(entry)

    def mark_partial(self, name: DeploymentId) -> None:
        """Take a deployment out of the queues, because its job has got GPUs; it still waits."""
        self.has_changed = True
        self._take_out(name)
        self.of_partial_jobs[name] = None

    def remove(self, name: DeploymentId) -> None:
        """Remove a deployment that has got GPUs or whose job has ended."""
        if name in self._units:
            self.has_changed = True
            self._take_out(name)
            del self._units[name]
            self.displaced.pop(name, None)
            self.counts.remove(name)
            tenant = self._tenants.pop(name)
            self.by_tenant[tenant] -= 1
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]

    def queues(self) -> "Iterator[tuple[Sizes, EquivalenceClass, Queue]]":
        """All queues, with the first deployments of their units."""
        for sizes, queues in self._queues.items():
            for equivalence, queue in queues.items():
                yield sizes, equivalence, queue

    def in_no_queue(self) -> list[DeploymentId]:
        """The deployments of partial jobs and of incomplete gangs."""
        return [name for name, unit in self._units.items() if unit is None]

    def unit_of(self, name: DeploymentId) -> Unit | None:
        """The unit of a waiting deployment; None: it is in no queue."""
        return self._units[name]

    def least_demand(self, sizes: Sizes) -> tuple[float, int] | None:
        """The smallest (duty, state bytes) of the heads of these sizes; None: there is none."""
        demands = self._demands.get(sizes)
        return None if demands is None else (demands[0][0], demands[1][0])

    def check(self) -> None:
        """Assert that `heads` has exactly the head of each queue."""
        heads = [
            self._unit(queue[0][2]).head
            for queues in self._queues.values()
            for queue in queues.values()
        ]
        indexed = []
        for sizes, owners in self.heads.items():
            for owner, indexes in owners.items():
                for key, index in indexes.items():
                    index.check()
                    for head in index:
                        indexed.append(head)
                        unit = self._unit(head.name)
                        assert (unit.sizes, unit.owner, unit.queue_key) == (sizes, owner, key)
        assert sorted(indexed) == sorted(heads), "the indexes do not hold the queue heads"
        _check_sizes(self.head_sizes, self.heads)
        _check_sizes(self.blocking_sizes, self.blocking_requests)
        assert len(self.counts) == len(self._units), "some waiting deployments are not counted"

    def _take_out(self, name: DeploymentId) -> None:
        """Remove a deployment and the rest of its gang from all queues."""
        self.of_partial_jobs.pop(name, None)
        unit = self._units[name]
        if unit is None:
            return
        entry = unit.head[:3]
        queue = self._queues[unit.sizes][unit.equivalence]
        if queue[0][2] == unit.head.name:
            heads = self._heads(unit)
            self._drop_head(heads, unit)
            if len(queue) > 1:
                self._add_head(heads, self._unit(queue[1][2]))
            elif not heads and _drop(self.heads, unit.sizes, unit.owner, unit.queue_key):
                self.head_sizes.discard(unit.sizes, unit.owner)
        queue.remove(entry)
        if not queue:
            del self._queues[unit.sizes][unit.equivalence]
            if not self._queues[unit.sizes]:
                del self._queues[unit.sizes]
        requests = self.blocking_requests[unit.sizes][unit.owner][unit.equivalence.expected_s]
        requests.remove(entry)
        expected_s = unit.equivalence.expected_s
        if not requests and _drop(self.blocking_requests, unit.sizes, unit.owner, expected_s):
            self.blocking_sizes.discard(unit.sizes, unit.owner)
        for member in unit.members:
            self._units[member.name] = None
            tenants = self.pending_by_tenant[member.size]
            pending = tenants[unit.owner.tenant]
            pending.remove(member[:3])
            if not pending:
                del tenants[unit.owner.tenant]
                if not tenants:
                    del self.pending_by_tenant[member.size]

    def _heads(self, unit: Unit) -> QueueHeadIndex:
        indexes = self.heads.setdefault(unit.sizes, {}).setdefault(unit.owner, {})
        found = indexes.get(unit.queue_key)
        if found is None:
            found = indexes[unit.queue_key] = QueueHeadIndex()
            self.head_sizes.add(unit.sizes, unit.owner)
        return found

    def _add_head(self, heads: QueueHeadIndex, unit: Unit) -> None:
        heads.add(unit.head)
        demands = self._demands.get(unit.sizes)
        if demands is None:
            demands = self._demands[unit.sizes] = SortedList(), SortedList()
        demands[0].add(unit.head.duty)
        demands[1].add(unit.head.state_bytes)

    def _drop_head(self, heads: QueueHeadIndex, unit: Unit) -> None:
        heads.remove(unit.head)
        duties, states = self._demands[unit.sizes]
        duties.remove(unit.head.duty)
        states.remove(unit.head.state_bytes)
        if not duties:
            del self._demands[unit.sizes]

    def _unit(self, name: DeploymentId) -> Unit:
        unit = self._units[name]
        assert unit is not None, f"{name} is in no queue"
        return unit


def _drop(
    queues: dict[Sizes, dict[Owner, dict[KeyT, ValueT]]], sizes: Sizes, owner: Owner, key: KeyT
) -> bool:
    """Delete an empty entry and the empty tables around it; returns whether the owner has no other
    entry for these sizes."""
    owners = queues[sizes]
    del owners[owner][key]
    if owners[owner]:
        return False
    del owners[owner]
    if not owners:
        del queues[sizes]
    return True


def _check_sizes(found: SizesByOwner, table: dict[Sizes, dict[Owner, dict[KeyT, ValueT]]]) -> None:
    listed = {
        (sizes, owner)
        for owners in found.priorities.values()
        for owner, known in owners.items()
        for sizes in known
    }
    held = {(sizes, owner) for sizes, owners in table.items() for owner in owners}
    assert listed == held, "the sizes of an owner differ from the table's"
