"""Whether the empty cluster holds all deployments of a job, some of them in shared groups. Pure."""

from collections.abc import Mapping, Sequence

from plexrl.scheduler.context.settings import Settings
from plexrl.scheduler.placement.capacity.needs import Need, kept_bytes, least_memory, need_of
from plexrl.scheduler.placement.capacity.node_pool import NodeKind
from plexrl.scheduler.state.records import Deployment

SEARCH_STEPS_MAX = 2000
"""Search steps after which deployments count as fitting. A job has few of them."""


def fit_in_groups(
    settings: Settings, free: Mapping[NodeKind, int], deployments: Sequence[Deployment]
) -> bool:
    """Whether some division of the deployments into groups fits the free GPUs of each kind: the
    members of a group are of one size, have room for their work in turns (`least_memory`), and are
    neither too many nor two rollouts of one job. Also true if the search takes more than
    `SEARCH_STEPS_MAX` steps.

    Args:
        settings: the cluster's.
        free: GPUs of each kind.
        deployments: those of one job.
    """
    return _Search(settings, free, deployments).holds(0)


class _Search:
    """Tries every group for one deployment after the other."""

    def __init__(
        self, settings: Settings, free: Mapping[NodeKind, int], deployments: Sequence[Deployment]
    ) -> None:
        self._left = dict(free)
        self._may_share = settings.anybody_shares
        self._members_max = settings.config.residents_max
        self._steps = 0
        self._groups: list[tuple[NodeKind, list[Deployment]]] = []
        # First those that never join the group of an earlier one, then the largest.
        self._order = sorted(
            deployments, key=lambda d: (not self._opens(d), -d.workers, _profile(d))
        )
        self._wanted = [0] * (len(self._order) + 1)
        """GPUs that the deployments from this one on take in groups of their own, at least."""
        for at in range(len(self._order) - 1, -1, -1):
            each = self._order[at]
            own = each.workers if self._opens(each) else 0
            self._wanted[at] = self._wanted[at + 1] + own

    def holds(self, at: int) -> bool:
        """Whether the deployments from this one on fit beside those before."""
        self._steps += 1
        if at == len(self._order) or self._steps > SEARCH_STEPS_MAX:
            return True
        if self._wanted[at] > sum(self._left.values()):
            return False
        return self._joins(at) or self._founds(at)

    def _opens(self, each: Deployment) -> bool:
        return each.kind == "rollout" or not self._shares(each)

    def _shares(self, each: Deployment) -> bool:
        return self._may_share and each.shares

    def _joins(self, at: int) -> bool:
        joining = self._order[at]
        tried = set()
        for kind, members in self._groups if not self._opens(joining) else ():
            equal = _alike(kind), tuple([_profile(each) for each in members])
            if (
                equal in tried
                or members[0].workers != joining.workers
                or not self._shares(members[0])
                or len(members) >= self._members_max
                or not _has_room(kind, [*members, joining])
            ):
                continue
            tried.add(equal)
            members.append(joining)
            is_held = self.holds(at + 1)
            members.pop()
            if is_held:
                return True
        return False

    def _founds(self, at: int) -> bool:
        first = self._order[at]
        tried = set()
        for kind, gpus in self._left.items():
            equal = _alike(kind), gpus
            if equal in tried or gpus < first.workers or not _has_room(kind, [first]):
                continue
            tried.add(equal)
            self._left[kind] = gpus - first.workers
            self._groups.append((kind, [first]))
            is_held = self.holds(at + 1)
            self._groups.pop()
            self._left[kind] = gpus
            if is_held:
                return True
        return False


def _has_room(kind: NodeKind, members: Sequence[Deployment]) -> bool:
    """Whether GPUs of this kind let these members work there in turns."""
    is_typed = {each.node_type for each in members} <= {"", kind.node_type}
    return is_typed and least_memory(kind.gpu_kind, members) <= kind.gpu_memory_bytes


def _alike(kind: NodeKind) -> tuple[str, int, str]:
    """Nodes that share no group differ in their fabric only."""
    return kind.node_type, kind.gpu_memory_bytes, kind.gpu_kind


def _profile(each: Deployment) -> tuple[Need, int]:
    """What distinguishes deployments in the search."""
    return need_of(each), kept_bytes(each)
