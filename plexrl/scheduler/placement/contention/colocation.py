"""Colocation: a rollout and the training of its own job in turns on the same GPUs.

In synchronous training one of them waits while the other works, so they never wait for each other,
and need no more than the switches in between. Their busy times then fill at most one cycle. If they
fill more, training is asynchronous, and both are busy at the same time.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from plexrl.scheduler.placement.borders import SPAN_MAX, may_divide
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.needs import (
    fits_as_placed,
    holds,
    need_of,
    node_types_compatible,
    placement_rank,
)
from plexrl.scheduler.placement.capacity.node_pool import NodeKind, kind_of
from plexrl.scheduler.placement.contention.service_level import has_tight_bound, waiting_bound
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.rules.switch_cost import moves_at_best_s

if TYPE_CHECKING:
    from plexrl.scheduler.state.records import Deployment, Group, State

_DEDICATED: Final = PlacementMode.DEDICATED

TOLERANCE: Final = 0.05
"""By so much of a cycle measured busy times may exceed it."""


class OwnGroup(NamedTuple):
    """A group of the job whose members a deployment can join to take turns with them."""

    group: "Group"
    is_worthwhile: bool
    """Whether this is better than GPUs of its own."""


def may_take_turns(members: Sequence["Deployment"]) -> bool:
    """Whether these are one job's rollout and others that work while it does not, as far as their
    demand is known."""
    if not _is_rollout_with_others(members):
        return False
    duties = [member.demand.trace.duty for member in members if member.demand.trace is not None]
    return math.fsum(duties) <= 1.0 + TOLERANCE


def may_share(capacity: Capacity, members: Sequence["Deployment"]) -> bool:
    """Whether these may take turns, or have no other way: the nodes in service have too few GPUs
    for all deployments of the job, each with its own."""
    if may_take_turns(members):
        return True
    if not _is_rollout_with_others(members):
        return False
    state = capacity.state
    all_of_job = [state.deployments[name] for name in state.jobs[members[0].job].deployments]
    lasting = sorted((each for each in all_of_job if not each.spec.preemptible), key=placement_rank)
    return not fits_as_placed(capacity.inventory.in_service(), [need_of(each) for each in lasting])


def takes_turns(members: Sequence["Deployment"]) -> bool:
    """As `may_take_turns`, and the demand of all is known."""
    return may_take_turns(members) and all(member.demand.trace is not None for member in members)


def _is_rollout_with_others(members: Sequence["Deployment"]) -> bool:
    rollouts = sum(member.spec.kind == "rollout" for member in members)
    return rollouts == 1 and len(members) > 1 and len({member.job for member in members}) == 1


def is_colocated(state: "State", group: "Group") -> bool:
    """Whether the group's members take turns."""
    return takes_turns([state.deployments[name] for name in group.members])


def is_partner(one: "Deployment", other: "Deployment") -> bool:
    """Whether one is a rollout of the other's job."""
    return one.job == other.job and (one.spec.kind == "rollout") != (other.spec.kind == "rollout")


def own_group(capacity: Capacity, deployment: "Deployment") -> OwnGroup | None:
    """Another group of the job in which `deployment` may take turns."""
    state = capacity.state
    for name in state.jobs[deployment.job].deployments:
        other = state.deployments[name]
        if not _is_elsewhere(other, deployment) or other.spec.workers < deployment.spec.workers:
            continue
        is_larger = other.spec.workers > deployment.spec.workers
        if is_larger and (
            deployment.spec.kind != "rollout" or not capacity.settings.divides_groups
        ):
            continue
        for group in state.groups_of(other):
            members = [*(state.deployments[member] for member in group.members), deployment]
            if len(group.gpus) < deployment.spec.workers or not may_share(capacity, members):
                continue
            if is_larger and not (may_divide(state, group) and is_worthwhile(capacity, members)):
                continue
            if _has_capacity(capacity, group, deployment):
                return OwnGroup(group, is_worthwhile(capacity, members))
    return None


def own_rollout_groups(capacity: Capacity, deployment: "Deployment") -> list["Group"]:
    """The groups of the job's rollouts on which a larger deployment can be, beside others, to take
    turns with them; of one kind of nodes. Empty: there are none, or it is not worthwhile."""
    state, found, gpus = capacity.state, list["Group"](), 0
    if (
        not capacity.settings.divides_groups
        or deployment.spec.kind != "train"
        or not deployment.spec.shares
    ):
        return found
    for name in state.jobs[deployment.job].deployments:
        other = state.deployments[name]
        if not _is_smaller_rollout(other, deployment) or not _is_elsewhere(other, deployment):
            continue
        group = state.groups[other.placement.groups[0]]
        members = [*(state.deployments[member] for member in group.members), deployment]
        if (
            gpus + len(group.gpus) < deployment.spec.workers
            and len(found) < SPAN_MAX - 1
            and (not found or _kind(state, group) == _kind(state, found[0]))
            and is_worthwhile(capacity, members)
            and _has_capacity(capacity, group, deployment)
        ):
            found.append(group)
            gpus += len(group.gpus)
    return found


def spans_later(situation: Situation, deployment: "Deployment") -> list["Deployment"]:
    """The rollouts of the job without GPUs whose GPUs a larger deployment can use, too, once they
    have some."""
    state = situation.state
    if (
        not situation.settings.divides_groups
        or deployment.spec.kind != "train"
        or not deployment.spec.shares
    ):
        return []
    others = map(state.deployment, state.jobs[deployment.job].deployments)
    return [
        other
        for other in others
        if not other.placement.groups
        and _is_smaller_rollout(other, deployment)
        and is_worthwhile(situation, (other, deployment))
    ]


def _trainers(situation: Situation, rollout: "Deployment") -> list["Deployment"]:
    """The job's training deployments without GPUs, if this is a rollout."""
    if rollout.spec.kind != "rollout":
        return []
    others = map(situation.state.deployment, situation.state.jobs[rollout.job].deployments)
    return [other for other in others if other.spec.kind == "train" and not other.placement.groups]


def _is_smaller_rollout(other: "Deployment", deployment: "Deployment") -> bool:
    return (
        other.spec.kind == "rollout"
        and other.spec.shares
        and not other.spec.preemptible
        and other.spec.workers < deployment.spec.workers
        and node_types_compatible(other.spec.node_type, deployment.spec.node_type)
    )


def _kind(state: "State", group: "Group") -> "NodeKind":
    return kind_of(state.nodes[group.gpus[0].node])


def has_siblings(situation: Situation, deployment: "Deployment") -> bool:
    """Whether the job has another deployment, also without GPUs, whose group this one may join.

    If each of them took GPUs of its own, some of a job that fits could be left without any.
    """
    state = situation.state
    return any(
        are_siblings(state.deployments[name], deployment)
        for name in state.jobs[deployment.job].deployments
    )


def siblings_group(capacity: Capacity, deployment: "Deployment") -> "Group | None":
    """The group of another deployment of the job with room for this one."""
    state = capacity.state
    for name in state.jobs[deployment.job].deployments:
        other = state.deployments[name]
        if not _is_elsewhere(other, deployment) or not are_siblings(other, deployment):
            continue
        group = state.groups[other.placement.groups[0]]
        duty = capacity.inventory.duty_when_placed(deployment)
        load = capacity.inventory.index.load(group.group) + duty
        if load <= capacity.settings.config.load_bound and _has_capacity(
            capacity, group, deployment
        ):
            members = [state.deployments[member] for member in group.members]
            only_own = all(member.job == deployment.job for member in members)
            if only_own or not has_tight_bound(capacity, deployment, group.members):
                return group
    return None


def are_siblings(one: "Deployment", other: "Deployment") -> bool:
    """Whether these deployments of a job may have one group; rollouts take turns with the training
    alone."""
    return (
        one is not other
        and one.spec.shares
        and other.spec.shares
        and "rollout" not in (one.spec.kind, other.spec.kind)
        and one.spec.workers == other.spec.workers
        and node_types_compatible(one.spec.node_type, other.spec.node_type)
    )


def is_worthwhile(situation: Situation, members: Sequence["Deployment"]) -> bool:
    """Whether these take turns, and need no greater part of their time for switches than their job
    accepts to wait."""
    if not takes_turns(members):
        return False
    state = situation.state
    moves = [moves_at_best_s(state, member) for member in members]
    switch_s = max(load for load, _ in moves) + max(offload for _, offload in moves)
    for member in members:
        assert member.demand.trace is not None, f"{member.deployment} takes turns"
        if switch_s > waiting_bound(situation, member) * (member.demand.trace.period_s + switch_s):
            return False
    return True


def waiting_partners(capacity: Capacity, deployment: "Deployment") -> list["Deployment"]:
    """Deployments of the job without GPUs, each of which may take turns with this one."""
    state, found = capacity.state, []
    for name in state.jobs[deployment.job].deployments:
        other = state.deployments[name]
        if (
            not other.placement.groups
            and other.spec.shares
            and not other.spec.preemptible
            and other.spec.workers == deployment.spec.workers
            and node_types_compatible(other.spec.node_type, deployment.spec.node_type)
            and may_share(capacity, (deployment, other))
        ):
            found.append(other)
    return found


def with_own_group(
    capacity: Capacity, deployment: "Deployment", found: tuple[PlacementMode, ...]
) -> tuple[PlacementMode, ...]:
    """The modes `found` by the policy, and those that join other deployments of the job.

    To take turns with them comes first if that is better than GPUs of its own, and last if it may
    be possible at all. Siblings come before GPUs of its own, if the policy would not pack them.
    """
    if capacity.settings.policy.repacks and has_siblings(capacity, deployment):
        at = found.index(_DEDICATED)
        found = (*found[:at], PlacementMode.SIBLINGS, *found[at:])
    if not capacity.settings.anybody_shares:
        return found
    if any(
        deployment in spans_later(capacity, trainer) for trainer in _trainers(capacity, deployment)
    ):
        # Its training will use the same GPUs.
        return (_DEDICATED, *(each for each in found if each != _DEDICATED))
    if deployment.spec.kind == "rollout" and deployment.demand.trace is None:
        # It may generate all the time.
        found = (_DEDICATED, *(each for each in found if each != _DEDICATED))
    if own_rollout_groups(capacity, deployment) or spans_later(capacity, deployment):
        return (PlacementMode.SPANNING, *found)
    own = own_group(capacity, deployment)
    if own is not None:
        if own.is_worthwhile:
            return (PlacementMode.COLOCATED, *found)
        return (*found, PlacementMode.COLOCATED)
    partners = waiting_partners(capacity, deployment)
    if any(is_worthwhile(capacity, (deployment, partner)) for partner in partners):
        # Both need no more GPUs than the partner alone if this one were in the gaps of others.
        return (PlacementMode.COLOCATED, _DEDICATED, *found)
    return (*found, PlacementMode.COLOCATED) if partners else found


def _is_elsewhere(other: "Deployment", deployment: "Deployment") -> bool:
    """Whether `other` has one group, which `deployment` is not on."""
    return (
        len(other.placement.groups) == 1
        and other.placement.groups[0] not in deployment.placement.groups
    )


def _has_capacity(capacity: Capacity, group: "Group", deployment: "Deployment") -> bool:
    return (
        capacity.inventory.takes_members(group)
        and len(group.members) < capacity.settings.config.residents_max
        and holds(capacity.inventory, group, deployment)
    )
