"""Who waits for GPUs, in lines: of those alike, only the first needs to be looked at.

A backlog holds many deployments and few kinds. Where there is no room for the first of a kind there
is none for the others, so a pass of the admission costs what the kinds cost, not what the backlog
does. Five lines matter:

* a *line* of deployments that all fit or all do not: same tenant, class, length, size and demand;
  in it, who came first has the better turn for as long as they wait;
* a *file*: the first of all lines of one tenant, class and length that want the same GPUs, with a
  profile all of them or none; of them, too, who came first has the better turn, and the first for
  whom there is room is found without a look at the others;
* a *wish*: those of one tenant, class and length that want the same GPUs; the first of them stands
  for all in keeping others from passing;
* an *asker*: all of one tenant that want the same GPUs; the same quotas hold them;
* *singles*, in no line: whose job has GPUs for another deployment already, or asked for a gang.

All of it follows from the state; `Context.reconfigure` makes it anew.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from sortedcontainers import SortedList

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.demand import DemandTrace
from plexrl.scheduler.line_heads import Head, LineHeads
from plexrl.scheduler.queue_counts import Place, QueueCounts
from plexrl.scheduler.state import Deployment, Job


class Size(NamedTuple):
    """GPUs that are asked for."""

    node_type: str
    workers: int
    shares: bool
    """On a group that others may be on too."""


class Rank(NamedTuple):
    """What, beside the time of coming, a turn depends on."""

    tenant: TenantId
    priority: int
    expected_s: float
    """A step of expected lengths."""


class Likeness(NamedTuple):
    """What a line has in common, beside its size."""

    rank: Rank
    state_bytes: int
    trace: DemandTrace | None


class File(NamedTuple):
    """What lines have in common whose first are kept together, beside their size."""

    rank: Rank
    has_profile: bool


if TYPE_CHECKING:
    _Queue = SortedList[tuple[float, DeploymentId]]
    """(time of creation, name), in the order of turns."""

JOB_S = 3600.0
"""Length of a job that its user said nothing about."""

_STEPS: Final = (4, 22)
"""Powers of two between which expected lengths are told apart: 16 s and 48 days."""


def expected_step(expected_s: float) -> float:
    """The expected length, down to a power of two: so there are few ranks, however many jobs."""
    _, exponent = math.frexp(expected_s or JOB_S)
    return 2.0 ** min(max(exponent - 1, _STEPS[0]), _STEPS[1])


KeyT = TypeVar("KeyT", Likeness, Rank, TenantId)


class Waiting:
    """Deployments without GPUs, iterated over in the order of their creation."""

    def __init__(self) -> None:
        self._filed: dict[DeploymentId, tuple[Head, Size, Likeness] | None] = {}
        self._lines: dict[Size, dict[Likeness, _Queue]] = {}
        self.files: dict[Size, dict[File, LineHeads]] = {}
        self.wishes: dict[Size, dict[Rank, _Queue]] = {}
        self.askers: dict[Size, dict[TenantId, _Queue]] = {}
        self.singles: dict[DeploymentId, None] = {}
        self.counts = QueueCounts()
        self.by_tenant: dict[TenantId, int] = {}
        """How many of each tenant wait."""
        self._tenants: dict[DeploymentId, TenantId] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._filed

    def __iter__(self) -> Iterator[DeploymentId]:
        return iter(self._filed)

    def __len__(self) -> int:
        return len(self._filed)

    def clear(self) -> None:
        """Forget everybody."""
        for part in (
            self._filed,
            self._lines,
            self.files,
            self.wishes,
            self.askers,
            self.singles,
            self.counts,
            self.by_tenant,
            self._tenants,
        ):
            part.clear()

    def add(
        self, deployment: Deployment, job: Job, *, duty: float, shares: bool, is_single: bool
    ) -> None:
        """The deployment waits from now on, behind all that were created before it; `duty` is what
        it would count for in a group."""
        name = deployment.deployment
        self.remove(name)
        place = Place(-job.priority, deployment.created_at, name)
        self.counts.add(deployment.node_type, place)
        self._tenants[name] = job.tenant
        self.by_tenant[job.tenant] = self.by_tenant.get(job.tenant, 0) + 1
        if is_single:
            self._filed[name] = None
            self.singles[name] = None
            return
        size = Size(deployment.node_type, deployment.workers, shares)
        rank = Rank(job.tenant, job.priority, expected_step(job.expected_s))
        likeness = Likeness(rank, deployment.state_bytes, deployment.trace)
        head = Head(deployment.created_at, name, duty, deployment.state_bytes)
        self._filed[name] = head, size, likeness
        entry = deployment.created_at, name
        line = self._lines.setdefault(size, {}).setdefault(likeness, SortedList())
        first = line[0][1] if line else None
        line.add(entry)
        if line[0][1] == name:
            heads = self._heads(size, likeness)
            if first is not None:
                heads.remove(self._head(first))
            heads.add(head)
        self.wishes.setdefault(size, {}).setdefault(rank, SortedList()).add(entry)
        self.askers.setdefault(size, {}).setdefault(job.tenant, SortedList()).add(entry)

    def remove(self, name: DeploymentId) -> None:
        """It has GPUs, or its job has ended."""
        if name in self._filed:
            self._take_out(name)
            del self._filed[name]
            self.counts.remove(name)
            tenant = self._tenants.pop(name)
            self.by_tenant[tenant] -= 1
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]

    def put_in_order(self, names: Iterable[DeploymentId]) -> None:
        """Iterate over those who wait in this order from now on."""
        self._filed = {name: self._filed[name] for name in names if name in self._filed}

    def single_out(self, name: DeploymentId) -> None:
        """Its job has GPUs now: it stands in no line any more, and keeps its place among all."""
        self._take_out(name)
        self._filed[name] = None
        self.singles[name] = None

    def place_of(self, name: DeploymentId) -> tuple[Size, File, Head] | None:
        """Where one of those who wait stands, and what it needs; None: in no line."""
        filed = self._filed[name]
        if filed is None:
            return None
        head, size, likeness = filed
        return size, _file_of(likeness), head

    def of_wish(self, size: Size, rank: Rank) -> Iterator[DeploymentId]:
        """Those that wish the same, in the order of their turns."""
        for _, name in self.wishes.get(size, {}).get(rank, ()):
            yield name

    def check(self) -> None:
        """Assert that each file has the first of its lines, and those only; that all count."""
        assert len(self.counts) == len(self._filed), "some who wait are not counted"
        heads = [
            self._head(line[0][1]) for lines in self._lines.values() for line in lines.values()
        ]
        filed = []
        for size, files in self.files.items():
            for file, line_heads in files.items():
                line_heads.check()
                for head in line_heads:
                    filed.append(head)
                    found = self._filed[head.name]
                    assert found is not None, f"{head.name} is in no line"
                    assert found[1] == size
                    assert _file_of(found[2]) == file
        assert sorted(filed) == sorted(heads), "a file has not the first of its lines"

    def _take_out(self, name: DeploymentId) -> None:
        filed = self._filed[name]
        if filed is None:
            del self.singles[name]
            return
        head, size, likeness = filed
        entry = head.created_at, name
        line = self._lines[size][likeness]
        if line[0][1] == name:
            heads = self._heads(size, likeness)
            heads.remove(head)
            if len(line) > 1:
                heads.add(self._head(line[1][1]))
            elif not heads:
                files = self.files[size]
                del files[_file_of(likeness)]
                if not files:
                    del self.files[size]
        _leave(self._lines, size, likeness, entry)
        _leave(self.wishes, size, likeness.rank, entry)
        _leave(self.askers, size, likeness.rank.tenant, entry)

    def _heads(self, size: Size, likeness: Likeness) -> LineHeads:
        files = self.files.setdefault(size, {})
        file = _file_of(likeness)
        found = files.get(file)
        if found is None:
            found = files[file] = LineHeads()
        return found

    def _head(self, name: DeploymentId) -> Head:
        filed = self._filed[name]
        assert filed is not None, f"{name} is in no line"
        return filed[0]


def _file_of(likeness: Likeness) -> File:
    return File(likeness.rank, likeness.trace is not None)


def _leave(
    queues: dict[Size, dict[KeyT, "_Queue"]],
    size: Size,
    key: KeyT,
    entry: tuple[float, DeploymentId],
) -> None:
    by_key = queues[size]
    by_key[key].remove(entry)
    if not by_key[key]:
        del by_key[key]
        if not by_key:
            del queues[size]
