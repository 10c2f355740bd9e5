"""Whether the empty cluster holds all deployments of a job, some of them in shared groups. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from plexrl.scheduler.placement.capacity.needs import Need, kept_bytes, least_memory, need_of
from plexrl.scheduler.placement.capacity.node_pool import NodeKind
from plexrl.scheduler.placement.fit import backtracking
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.records import Deployment

_Profile = tuple[bool, int, Need, int, bool]
"""What distinguishes deployments in the search, in the order in which they get their groups."""
_Alike = tuple[str, int, str]
_Group = tuple[_Alike, tuple[int, ...]]
"""Its GPUs, and the profiles of its members in the order in which they joined. Equal groups are
interchangeable."""


def fit_in_groups(
    settings: Settings, free: Mapping[NodeKind, int], deployments: Sequence[Deployment]
) -> bool:
    """Whether some division of the deployments into groups fits the free GPUs of each kind: the
    members of a group are of one size, have room for their work in turns (`least_memory`), and are
    neither too many nor two rollouts of one job. Also true if the search takes too long.

    Args:
        settings: the cluster's.
        free: GPUs of each kind.
        deployments: those of one job.
    """
    search = _Search(settings, free, deployments)
    return backtracking.is_possible(len(deployments), search.options)


class _Search:
    """Tries every group for one deployment after the other."""

    def __init__(
        self, settings: Settings, free: Mapping[NodeKind, int], deployments: Sequence[Deployment]
    ) -> None:
        self._left = dict(free)
        self._gpus = sum(free.values())
        self._may_share = settings.anybody_shares
        self._members_max = settings.config.residents_max
        self._groups: Counter[_Group] = Counter()
        self._rooms: dict[_Group, bool] = {}
        by_profile = {self._profile(deployment): deployment for deployment in deployments}
        profiles = sorted(by_profile)
        self._kinds = [by_profile[profile] for profile in profiles]
        """A deployment of each profile."""
        numbers = {profile: number for number, profile in enumerate(profiles)}
        self._order = sorted([numbers[self._profile(deployment)] for deployment in deployments])
        self._wanted = [0] * (len(self._order) + 1)
        """GPUs that the deployments from this one on take in groups of their own, at least."""
        for at in range(len(self._order) - 1, -1, -1):
            each = self._kinds[self._order[at]]
            own = each.spec.workers if self._opens(each) else 0
            self._wanted[at] = self._wanted[at + 1] + own

    def options(self, at: int) -> Iterator[bool]:
        """The groups of one deployment beside those before, as `backtracking.Options`."""
        if self._wanted[at] <= self._gpus:
            yield from self._joined(self._order[at])
            yield from self._founded(self._order[at])

    def _opens(self, each: Deployment) -> bool:
        """Whether it never joins the group of an earlier one."""
        return each.spec.kind == "rollout" or not self._shares(each)

    def _shares(self, each: Deployment) -> bool:
        return self._may_share and each.spec.shares

    def _profile(self, each: Deployment) -> _Profile:
        is_open = self._opens(each)
        return not is_open, -each.spec.workers, need_of(each), kept_bytes(each), self._shares(each)

    def _joined(self, own: int) -> Iterator[bool]:
        joining = self._kinds[own]
        if self._opens(joining):
            return
        for group in list(self._groups):
            kind, members = group
            first = self._kinds[members[0]]
            larger = kind, (*members, own)
            if (
                first.spec.workers != joining.spec.workers
                or not self._shares(first)
                or len(members) >= self._members_max
                or not self._has_room(larger)
            ):
                yield False
                continue
            self._replace(group, larger)
            yield True
            self._replace(larger, group)

    def _founded(self, own: int) -> Iterator[bool]:
        workers = self._kinds[own].spec.workers
        tried = set()
        for kind, gpus in self._left.items():
            group = _alike(kind), (own,)
            equal = group, gpus
            if equal in tried or gpus < workers or not self._has_room(group):
                yield False
                continue
            tried.add(equal)
            self._left[kind] = gpus - workers
            self._gpus -= workers
            self._groups[group] += 1
            yield True
            self._remove(group)
            self._gpus += workers
            self._left[kind] = gpus

    def _replace(self, group: _Group, other: _Group) -> None:
        self._remove(group)
        self._groups[other] += 1

    def _remove(self, group: _Group) -> None:
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]

    def _has_room(self, group: _Group) -> bool:
        """Whether its GPUs let these members work there in turns."""
        known = self._rooms.get(group)
        if known is None:
            (node_type, memory_bytes, gpu_kind), numbers = group
            members = [self._kinds[number] for number in numbers]
            is_typed = {member.spec.node_type for member in members} <= {"", node_type}
            known = is_typed and least_memory(gpu_kind, members) <= memory_bytes
            self._rooms[group] = known
        return known


def _alike(kind: NodeKind) -> _Alike:
    """Nodes that share no group differ in their fabric only."""
    return kind.node_type, kind.gpu_memory_bytes, kind.gpu_kind
