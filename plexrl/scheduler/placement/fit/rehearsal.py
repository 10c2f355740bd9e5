"""A placement of waiting deployments on GPUs that are free, without changing anything.

It follows `placement.place` as far as its choices are certain: joins that depend on demand traces
or on time are left out. So it fails at times where the placement would not, as for members that
only the shifts of their traces let share a group.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from plexrl.scheduler.placement.borders import SPAN_MAX
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.needs import least_memory, need_of, placement_rank, suits
from plexrl.scheduler.placement.capacity.node_pool import NodeKind, choice_order, is_in_service
from plexrl.scheduler.placement.contention.colocation import (
    are_siblings,
    is_worthwhile,
    may_share,
)
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.state.records import Deployment


@dataclass(slots=True, kw_only=True)
class _Group:
    kind: NodeKind
    members: list[Deployment] = field(default_factory=list)


def in_placement_order(deployments: Sequence[Deployment]) -> list[Deployment]:
    """Deployments that get GPUs at the same time, in the order in which they get them."""
    return sorted(deployments, key=lambda d: (*placement_rank(d), d.serial))


class Rehearsal:
    """Places deployments one after the other on groups that exist here only."""

    def __init__(
        self, capacity: Capacity, free: Mapping[NodeKind, int], *, turns_first: bool
    ) -> None:
        """`free`: GPUs of each kind. `turns_first`: those that may take turns with others of the
        job do so, also if there are GPUs for them."""
        self._capacity = capacity
        self._left = dict(free)
        self._turns_first = turns_first
        self._groups: list[_Group] = []
        self.asked: list[tuple[tuple[Deployment, ...], bool]] = []
        """Whether turns were worthwhile, which follows from measured moves."""
        nodes = [node for node in capacity.state.nodes.values() if is_in_service(node)]
        self._tier_bytes = min((n.host_memory_bytes + n.nvme_bytes for n in nodes), default=0)
        policy = capacity.settings.policy
        modes = policy.modes(has_profile=False, is_patience_over=False, is_scarce=False)
        self._packs = PlacementMode.PACKED in modes

    def place(self, joining: Deployment) -> bool:
        """Whether the deployment gets GPUs, of its own or of a group."""
        if not joining.spec.shares:
            return self._found(joining)
        # A rollout that may generate all the time has GPUs of its own first.
        is_own_first = joining.spec.kind == "rollout" and joining.demand.trace is None
        return (
            self._join(joining, self._of_siblings(joining))
            or (self._turns_first and self._take_turns(joining))
            or (is_own_first and self._found(joining))
            or self._join(joining, self._fullest(joining))
            or self._found(joining)
            or self._take_turns(joining)
        )

    def span(self, joining: Deployment) -> bool:
        """Whether a training gets the GPUs of its own smaller rollouts, which have some, to work in
        turns with them, and free ones for the rest."""
        if joining.spec.kind != "train" or not joining.spec.shares:
            return False
        hosts, rest = list[_Group](), joining.spec.workers
        for group in self._groups:
            if (
                [member.spec.kind for member in group.members] == ["rollout"]
                and group.members[0].job == joining.job
                and (not hosts or group.kind == hosts[0].kind)
                and len(hosts) < SPAN_MAX - 1
                and group.members[0].spec.workers < rest
                and joining.spec.node_type in ("", group.kind.node_type)
                and least_memory(group.kind.gpu_kind, (*group.members, joining))
                <= group.kind.gpu_memory_bytes
                and self._is_worthwhile((*group.members, joining))
            ):
                hosts.append(group)
                rest -= group.members[0].spec.workers
        if not hosts or self._left[hosts[0].kind] < rest:
            return False
        self._left[hosts[0].kind] -= rest
        for group in hosts:
            group.members.append(joining)
        return True

    def _is_worthwhile(self, members: tuple[Deployment, ...]) -> bool:
        found = is_worthwhile(self._capacity, members)
        self.asked.append((members, found))
        return found

    def _found(self, deployment: Deployment) -> bool:
        """Give it a group of its own."""
        left, need = self._left, need_of(deployment)
        kinds = [kind for kind in left if left[kind] >= need.workers and suits(kind, need)]
        if not kinds:
            return False
        kind = min(kinds, key=lambda each: choice_order(each, left[each], need.by_speed))
        left[kind] -= need.workers
        self._groups.append(_Group(kind=kind, members=[deployment]))
        return True

    def _join(self, joining: Deployment, groups: Iterable[_Group]) -> bool:
        """Join the first group."""
        for group in groups:
            group.members.append(joining)
            return True
        return False

    def _of_siblings(self, joining: Deployment) -> Iterator[_Group]:
        if self._capacity.settings.policy.repacks:
            for group in self._with_room(joining):
                if any(are_siblings(member, joining) for member in group.members):
                    yield group

    def _fullest(self, joining: Deployment) -> list[_Group]:
        if not self._packs:
            return []
        groups = [
            group
            for group in self._with_room(joining)
            if joining.spec.kind != "rollout"
            or all(m.spec.kind != "rollout" for m in group.members)
        ]
        return sorted(groups, key=lambda group: (-len(group.members), -self._load(group)))

    def _take_turns(self, joining: Deployment) -> bool:
        if not self._capacity.settings.anybody_shares:
            return False
        some = self._with_room(joining, load_max=math.inf)
        may = (each for each in some if may_share(self._capacity, (*each.members, joining)))
        return self._join(joining, may)

    def _with_room(self, joining: Deployment, load_max: float | None = None) -> Iterator[_Group]:
        """The groups that can take one more member. `load_max`: default is the policy's."""
        config = self._capacity.settings.config
        bound = config.load_bound if load_max is None else load_max
        duty = self._capacity.inventory.duty_when_placed(joining)
        for group in self._groups:
            kind, members = group.kind, (*group.members, joining)
            if (
                group.members[0].spec.shares
                and group.members[0].spec.workers == joining.spec.workers
                and len(members) <= config.residents_max
                and joining.spec.node_type in ("", kind.node_type)
                and self._load(group) + duty <= bound
                and sum([member.spec.state_bytes for member in members]) <= self._tier_bytes
                and least_memory(kind.gpu_kind, members) <= kind.gpu_memory_bytes
            ):
                yield group

    def _load(self, group: _Group) -> float:
        return math.fsum(map(self._capacity.inventory.duty_when_placed, group.members))
