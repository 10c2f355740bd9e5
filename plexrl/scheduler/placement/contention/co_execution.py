"""Co-execution groups: finds a group whose round has time for one more member (RollMux, arXiv
2512.11306).

Each member of a group runs once in a round. A round is as long as the longest cycle of the members,
so the member with that cycle loses nothing, and members with shorter cycles wait for the round to
end. RollMux plans for the worst case of a phase. Here a member's share of the round is the busy
time of its cycle, increased by the relative jitter, plus the switch to it and back. A group is
feasible if all shares fit into the round. Its cost is the total stretch of the members' cycles. Of
the groups whose residents all fit into host memory (the *residency constraint*) the cheapest is
chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plexrl.scheduler.placement.contention.service_level import waiting_bound
from plexrl.scheduler.rules.switch_cost import load_s, offload_s

if TYPE_CHECKING:
    from plexrl.scheduler.rules.settings import Situation
    from plexrl.scheduler.state.records import Deployment, Group, State


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundShare:
    """The time of a round that one member needs."""

    cycle_s: float
    """Length of its cycle without waiting."""
    busy_s: float
    """Time on the group in each cycle, including switches, in the worst case."""


def round_s(shares: Sequence[RoundShare]) -> float | None:
    """Length of the round; None if the shares do not fit."""
    longest_s = max(share.cycle_s for share in shares)
    return longest_s if math.fsum(share.busy_s for share in shares) <= longest_s else None


def total_stretch(shares: Sequence[RoundShare], length_s: float) -> float:
    """Sum of the relative stretches of the cycles in a round of this length."""
    return math.fsum(length_s / share.cycle_s - 1.0 for share in shares)


def round_share(state: "State", deployment: "Deployment", group: "Group") -> RoundShare | None:
    """The share that the deployment needs of a round of `group`; None without a profile."""
    trace = deployment.demand.trace
    if trace is None:
        return None
    worst_s = trace.busy_s * (1.0 + trace.jitter_s / trace.period_s)
    switches_s = offload_s(state, deployment, group.gpus) + load_s(state, deployment, group.gpus)
    return RoundShare(cycle_s=trace.period_s, busy_s=worst_s + switches_s)


def added_stretch(situation: "Situation", group: "Group", deployment: "Deployment") -> float | None:
    """How much the members' total stretch would grow if the deployment joined `group`.

    None if the shares would not fit, or a member would wait more than its job accepts.
    """
    state = situation.state
    newcomer = round_share(state, deployment, group)
    if newcomer is None:
        return None
    shares = []
    bounds = [waiting_bound(situation, deployment)]
    for name in group.members:
        member = state.deployment(name)
        share = round_share(state, member, group)
        if share is None:
            return None
        shares.append(share)
        bounds.append(waiting_bound(situation, member))
    before_s, after_s = round_s(shares), round_s([*shares, newcomer])
    if before_s is None or after_s is None:
        return None
    for share, bound in zip([newcomer, *shares], bounds, strict=True):
        if 1.0 - share.cycle_s / after_s > bound:
            return None
    return total_stretch([*shares, newcomer], after_s) - total_stretch(shares, before_s)
