"""Who waits for GPUs, in queues: of those node_types_compatible, only the first needs to be looked at.

A backlog holds many deployments and few kinds. Where there is no room for the first of a kind there
is none for the others, so a pass of the admission costs what the kinds cost, not what the backlog
does. A *unit* is a deployment, or all deployments of a gang, which get GPUs at once. A unit's
*sizes* are what its deployments want. Units stand in these queues:

* a *line*: units that all fit or all do not: same tenant, class, expected length, sizes and demand.
  In it, who came first has the better turn for as long as they wait;
* a *file*: the first of all lines of one tenant, class and length that want the same sizes, with a
  profile all of them or none. Of them, too, who came first has the better turn, and the first for
  whom there is room is found without a look at the others;
* a *wish*: all of one tenant, class and length that want the same sizes. The first of them stands
  for all in keeping others from passing.

Besides, *pending_by_tenant* are all deployments of one tenant that want the same size: the same quotas hold
them. In no queue are the *of_partial_jobs*, whose job has GPUs for another deployment already, and the
deployments of gangs that are not complete yet.

All of it follows from the state; `Context.reconfigure` makes it anew.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from sortedcontainers import SortedList

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.admission.queues.queue_counts import Place, QueueCounts
from plexrl.scheduler.admission.queues.queue_heads import Head, QueueHeadIndex
from plexrl.scheduler.state.demand import DemandTrace
from plexrl.scheduler.state.records import Deployment, Job


class Size(NamedTuple):
    """GPUs that are asked for."""

    node_type: str
    workers: int
    shares: bool
    """On a group that others may be on too."""


Sizes = tuple[Size, ...]
"""Of a unit, ascending."""


class Owner(NamedTuple):
    """Whose turn depends on the same share and class."""

    tenant: TenantId
    priority: int


class EquivalenceClass(NamedTuple):
    """What a line has in common, beside its sizes."""

    owner: Owner
    expected_s: float
    """A step of expected lengths."""
    demand: tuple[tuple[int, DemandTrace | None], ...]
    """State bytes and trace of each deployment, in the order of the sizes."""


class QueueKey(NamedTuple):
    """What lines have in common whose first are kept together, beside sizes and owner."""

    expected_s: float
    has_profile: bool


class Member(NamedTuple):
    """One deployment of a unit."""

    created_at: float
    name: DeploymentId
    size: Size


class Unit(NamedTuple):
    """Where a unit stands."""

    head: Head
    sizes: Sizes
    equivalence: EquivalenceClass
    members: tuple["Member", ...]
    """The unit has the turn of the one that was created first."""

    @property
    def owner(self) -> Owner:
        return self.equivalence.owner

    @property
    def file(self) -> QueueKey:
        has_profile = any(trace is not None for _, trace in self.equivalence.demand)
        return QueueKey(self.equivalence.expected_s, has_profile)


if TYPE_CHECKING:
    Queue = SortedList[tuple[float, DeploymentId]]
    """(time of creation, name), in the order of turns."""

KeyT = TypeVar("KeyT", QueueKey, float)
ValueT = TypeVar("ValueT")

JOB_S = 3600.0
"""Length of a job that its user said nothing about."""

_STEPS: Final = (4, 22)
"""Powers of two between which expected lengths are told apart: 16 s and 48 days."""


def expected_step(expected_s: float) -> float:
    """The expected length, down to a power of two: so there are few files, however many jobs."""
    _, exponent = math.frexp(expected_s or JOB_S)
    return 2.0 ** min(max(exponent - 1, _STEPS[0]), _STEPS[1])


def size_of(deployment: Deployment) -> Size:
    """The GPUs that one deployment asks for."""
    return Size(deployment.node_type, deployment.workers, deployment.shares)


class Waiting:
    """Deployments without GPUs."""

    def __init__(self) -> None:
        self._units: dict[DeploymentId, Unit | None] = {}
        """Of each that waits; None: in no queue."""
        self._lines: dict[Sizes, dict[EquivalenceClass, Queue]] = {}
        self.files: dict[Sizes, dict[Owner, dict[QueueKey, QueueHeadIndex]]] = {}
        self.least: dict[Sizes, tuple[float, int]] = {}
        """Duty and state bytes that nobody of `files` has less of."""
        self.blocking_requests: dict[Sizes, dict[Owner, dict[float, Queue]]] = {}
        self.pending_by_tenant: dict[Size, dict[TenantId, Queue]] = {}
        self.of_partial_jobs: dict[DeploymentId, None] = {}
        self.displaced: dict[DeploymentId, None] = {}
        """Those that had GPUs before, and may have state on nodes."""
        self.counts = QueueCounts()
        self.by_tenant: dict[TenantId, int] = {}
        """How many of each tenant wait."""
        self._tenants: dict[DeploymentId, TenantId] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._units

    def __iter__(self) -> Iterator[DeploymentId]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def clear(self) -> None:
        """Forget everybody."""
        for part in (
            *(
                self._units,
                self._lines,
                self.files,
                self.least,
                self.blocking_requests,
                self.pending_by_tenant,
            ),
            *(self.of_partial_jobs, self.displaced),
            *(self.counts, self.by_tenant, self._tenants),
        ):
            part.clear()

    def enter(self, deployment: Deployment, job: Job) -> None:
        """The deployment waits from now on, in no queue yet; one that waits leaves its queues."""
        name = deployment.deployment
        if name in self._units:
            self._take_out(name)
            return
        self._units[name] = None
        if deployment.incarnation:
            self.displaced[name] = None
        self._tenants[name] = job.tenant
        self.by_tenant[job.tenant] = self.by_tenant.get(job.tenant, 0) + 1
        self.counts.add(deployment.node_type, Place(-job.priority, deployment.created_at, name))

    def enqueue_unit(self, deployments: Sequence[Deployment], job: Job, duty: float) -> None:
        """Those that wait get GPUs at once, and stand in the queues from now on; `duty` is what a
        single one would count for in a group."""
        for each in deployments:
            self._take_out(each.deployment)
        ordered = sorted(deployments, key=lambda each: (size_of(each), each.created_at))
        members = [Member(each.created_at, each.deployment, size_of(each)) for each in ordered]
        first, demand = min(members), tuple((each.state_bytes, each.trace) for each in ordered)
        needs = (duty, ordered[0].state_bytes) if len(ordered) == 1 else (0.0, 0)
        head = Head(first.created_at, first.name, *needs)
        owner = Owner(job.tenant, job.priority)
        equivalence = EquivalenceClass(owner, expected_step(job.expected_s), demand)
        unit = Unit(head, tuple(each.size for each in members), equivalence, tuple(members))
        for member in members:
            self._units[member.name] = unit
            queue = self.pending_by_tenant.setdefault(member.size, {}).setdefault(
                job.tenant, SortedList()
            )
            queue.add((member.created_at, member.name))
        duty, state_bytes = self.least.get(unit.sizes, (head.duty, head.state_bytes))
        self.least[unit.sizes] = min(duty, head.duty), min(state_bytes, head.state_bytes)
        entry = head.created_at, head.name
        line = self._lines.setdefault(unit.sizes, {}).setdefault(unit.equivalence, SortedList())
        before = line[0][1] if line else None
        line.add(entry)
        if line[0][1] == head.name:
            heads = self._heads(unit)
            if before is not None:
                heads.remove(self._unit(before).head)
            heads.add(head)
        blocking_requests = self.blocking_requests.setdefault(unit.sizes, {}).setdefault(owner, {})
        blocking_requests.setdefault(unit.equivalence.expected_s, SortedList()).add(entry)

    def mark_partial(self, name: DeploymentId) -> None:
        """Its job has GPUs now: it stands in no queue any more, and keeps its place among all."""
        self._take_out(name)
        self.of_partial_jobs[name] = None

    def remove(self, name: DeploymentId) -> None:
        """It has GPUs, or its job has ended."""
        if name in self._units:
            self._take_out(name)
            del self._units[name]
            self.displaced.pop(name, None)
            self.counts.remove(name)
            tenant = self._tenants.pop(name)
            self.by_tenant[tenant] -= 1
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]

    def lines(self) -> "Iterator[tuple[Sizes, EquivalenceClass, Queue]]":
        """All lines, with the first deployments of their units."""
        for sizes, lines in self._lines.items():
            for equivalence, line in lines.items():
                yield sizes, equivalence, line

    def in_no_queue(self) -> list[DeploymentId]:
        """Singles, and the deployments of gangs that are not complete yet."""
        return [name for name, unit in self._units.items() if unit is None]

    def unit_of(self, name: DeploymentId) -> Unit | None:
        """The unit that one of those who wait belongs to; None: it stands in no queue."""
        return self._units[name]

    def check(self) -> None:
        """Assert that each file has the first of its lines, and those only."""
        heads = [
            self._unit(line[0][1]).head for lines in self._lines.values() for line in lines.values()
        ]
        filed = []
        for sizes, owners in self.files.items():
            for owner, files in owners.items():
                for file, line_heads in files.items():
                    line_heads.check()
                    for head in line_heads:
                        filed.append(head)
                        unit = self._unit(head.name)
                        assert (unit.sizes, unit.owner, unit.file) == (sizes, owner, file)
        assert sorted(filed) == sorted(heads), "a file has not the first of its lines"
        assert len(self.counts) == len(self._units), "some who wait are not counted"

    def _take_out(self, name: DeploymentId) -> None:
        """Out of all queues, with the rest of its gang."""
        self.of_partial_jobs.pop(name, None)
        unit = self._units[name]
        if unit is None:
            return
        entry = unit.head.created_at, unit.head.name
        line = self._lines[unit.sizes][unit.equivalence]
        if line[0][1] == unit.head.name:
            heads = self._heads(unit)
            heads.remove(unit.head)
            if len(line) > 1:
                heads.add(self._unit(line[1][1]).head)
            elif not heads:
                _drop(self.files, unit.sizes, unit.owner, unit.file)
                if unit.sizes not in self.files:
                    del self.least[unit.sizes]
        line.remove(entry)
        if not line:
            del self._lines[unit.sizes][unit.equivalence]
            if not self._lines[unit.sizes]:
                del self._lines[unit.sizes]
        wish = self.blocking_requests[unit.sizes][unit.owner][unit.equivalence.expected_s]
        wish.remove(entry)
        if not wish:
            _drop(self.blocking_requests, unit.sizes, unit.owner, unit.equivalence.expected_s)
        for member in unit.members:
            self._units[member.name] = None
            pending_by_tenant = self.pending_by_tenant[member.size]
            queue = pending_by_tenant[unit.owner.tenant]
            queue.remove((member.created_at, member.name))
            if not queue:
                del pending_by_tenant[unit.owner.tenant]
                if not pending_by_tenant:
                    del self.pending_by_tenant[member.size]

    def _heads(self, unit: Unit) -> QueueHeadIndex:
        files = self.files.setdefault(unit.sizes, {}).setdefault(unit.owner, {})
        found = files.get(unit.file)
        if found is None:
            found = files[unit.file] = QueueHeadIndex()
        return found

    def _unit(self, name: DeploymentId) -> Unit:
        unit = self._units[name]
        assert unit is not None, f"{name} is in no queue"
        return unit


def _drop(
    queues: dict[Sizes, dict[Owner, dict[KeyT, ValueT]]], sizes: Sizes, owner: Owner, key: KeyT
) -> None:
    """Forget an empty queue, and what was kept for it alone."""
    owners = queues[sizes]
    del owners[owner][key]
    if not owners[owner]:
        del owners[owner]
        if not owners:
            del queues[sizes]
