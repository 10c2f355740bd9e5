"""Borders between groups: a group is divided where a smaller deployment is to use a part of it, and
united with its neighbour where no member needs the border (PlexRL §4.3).

Both change only how the same GPUs are divided. The members of a group are then members of both
parts, which they hold or not at the same time, under the same token. Their ranks stay, and so does
the name of the group of their first ranks, under which their workers were started. So that the
number of groups stays small, a part is taken from an end of the group, on the fewest nodes, and a
deployment is on at most `SPAN_MAX` groups.
"""

from dataclasses import replace

from plexrl.ids import DeploymentId, GroupId
from plexrl.scheduler.accounting.sharing import settle_group
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.state.records import Group, State
from plexrl.wire.messages import RankPlacement

SPAN_MAX = 8
"""Most groups of one deployment."""


def may_divide(state: State, group: Group) -> bool:
    """Whether the group may be divided. A filler uses a group as a whole."""
    if group.fillers:
        return False
    return all(len(state.deployments[name].placement.groups) < SPAN_MAX for name in group.members)


def divide(capacity: Capacity, group: Group, count: int, now: float) -> Group:
    """Divide `group`; returns the one with `count` of its GPUs, which are fewer than all. The part
    with the first GPUs keeps its name."""
    state = capacity.state
    assert 0 < count < len(group.gpus), f"{count} GPUs are no part of {group.group}"
    settle_group(state, group, now)
    capacity.inventory.leave(group)
    ends = group.gpus[:count], group.gpus[-count:]
    is_first = len({gpu.node for gpu in ends[0]}) <= len({gpu.node for gpu in ends[1]})
    border = count if is_first else -count
    state.groups_made += 1
    second = replace(
        group,
        group=GroupId(f"g{state.groups_made}"),
        serial=state.groups_made,
        gpus=_numbered(group.gpus[border:]),
        members=list(group.members),
        fillers=[],
        shares=dict(group.shares),
        wait_errors=list(group.wait_errors),
        switches=0,
        switch_seconds=0.0,
    )
    group.gpus = _numbered(group.gpus[:border])
    state.groups[second.group] = second
    for name in group.members:
        state.deployments[name].placement.replace((group.group,), (group.group, second.group))
    capacity.inventory.enter_again([group, second])
    return group if is_first else second


def unite_all(capacity: Capacity, names: tuple[GroupId, ...], now: float) -> tuple[GroupId, ...]:
    """Unite each of these groups, as far as it exists, with the neighbours from which no member
    needs a border. Returns the groups that have grown, whose next steps must be decided."""
    grown: dict[GroupId, None] = {}
    for name in names:
        group = capacity.state.groups.get(name)
        while group is not None and (neighbour := _neighbour(capacity.state, group)) is not None:
            group = _unite(capacity, group, neighbour, now)
            grown[group.group] = None
    return tuple(grown)


def _neighbour(state: State, group: Group) -> Group | None:
    """A group with the same members, next to this one in the ranks of each of them."""
    if not group.members or group.fillers:
        return None
    on = state.deployments[group.members[0]].placement.groups
    at = on.index(group.group)
    for name in (*on[max(0, at - 1) : at], *on[at + 1 : at + 2]):
        other = state.groups[name]
        if (
            set(other.members) == set(group.members)
            and not other.fillers
            and (other.holder, other.incoming) == (group.holder, group.incoming)
            and all(_are_next(state, member, group, other) for member in group.members)
        ):
            return other
    return None


def _are_next(state: State, member: DeploymentId, one: Group, other: Group) -> bool:
    """Whether the ranks of both groups follow each other, as in the first member."""
    first, here = (
        state.deployments[one.members[0]].placement.groups,
        state.deployments[member].placement.groups,
    )
    apart = here.index(other.group) - here.index(one.group)
    return apart == first.index(other.group) - first.index(one.group)


def _unite(capacity: Capacity, one: Group, other: Group, now: float) -> Group:
    state = capacity.state
    on = state.deployments[one.members[0]].placement.groups
    first, second = (one, other) if on.index(one.group) < on.index(other.group) else (other, one)
    for each in (one, other):
        settle_group(state, each, now)
        capacity.inventory.leave(each)
    for name in first.members:
        state.deployments[name].placement.replace((first.group, second.group), (first.group,))
    first.gpus = _numbered(first.gpus + second.gpus)
    first.is_closed = first.is_closed or second.is_closed
    first.alone_since = max(first.alone_since, second.alone_since)
    state.former_switches += second.switches
    del state.groups[second.group]
    capacity.inventory.enter_again([first])
    return first


def _numbered(gpus: tuple[RankPlacement, ...]) -> tuple[RankPlacement, ...]:
    return tuple(
        RankPlacement(rank=rank, node=gpu.node, gpu=gpu.gpu) for rank, gpu in enumerate(gpus)
    )
