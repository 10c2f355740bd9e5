"""Co-execution groups: which group's round has a turn left for one more member (RollMux, arXiv
2512.11306).

The members of a group take turns, each once in a round. A round is as long as the longest of their
cycles: with the others' turns in it, that member loses nothing, and one with a shorter cycle waits
for the round to come about. RollMux plans conservatively, for the worst that a phase may take; here
a turn counts as the busy time of a cycle, more by the part that the job's cycles vary, and the
switch to it and back. The group is feasible where all turns fit the round. Its price is what the
members' cycles are stretched by; of the groups whose residents all stay in host memory (the
*residency constraint*) the cheapest takes the newcomer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plexrl.scheduler.dispatch.switch_cost import load_s, offload_s

if TYPE_CHECKING:
    from plexrl.scheduler.core.context import Context
    from plexrl.scheduler.state.records import Deployment, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundShare:
    """What one member asks of a round."""

    cycle_s: float
    """Its cycle, did it never wait."""
    turn_s: float
    """Of the group in each cycle, at worst."""


def round_s(turns: Sequence[RoundShare]) -> float | None:
    """Length of the round in which each has its turn; None where they do not fit."""
    longest_s = max(turn.cycle_s for turn in turns)
    return longest_s if math.fsum(turn.turn_s for turn in turns) <= longest_s else None


def stretch(turns: Sequence[RoundShare], length_s: float) -> float:
    """By what part their cycles are longer in rounds of this length, summed."""
    return math.fsum(length_s / turn.cycle_s - 1.0 for turn in turns)


def round_share(context: "Context", deployment: "Deployment", group: "Group") -> RoundShare | None:
    """What the deployment asks, or would ask, of a round of `group`; None without a profile."""
    trace = deployment.trace
    if trace is None:
        return None
    worst_s = trace.busy_s * (1.0 + trace.jitter_s / trace.period_s)
    switches_s = offload_s(context, deployment, group.gpus) + load_s(
        context, deployment, group.gpus
    )
    return RoundShare(cycle_s=trace.period_s, turn_s=worst_s + switches_s)


def added_stretch(context: "Context", group: "Group", deployment: "Deployment") -> float | None:
    """By what part cycles would become longer with the deployment in `group`, summed over all.

    None where the group has no turn for it, or somebody would wait more than the service level
    allows.
    """
    newcomer = round_share(context, deployment, group)
    if newcomer is None:
        return None
    turns = []
    for name in group.members:
        turn = round_share(context, context.deployment(name), group)
        if turn is None:
            return None
        turns.append(turn)
    before_s, after_s = round_s(turns), round_s([*turns, newcomer])
    if before_s is None or after_s is None:
        return None
    shortest_s = min(turn.cycle_s for turn in (*turns, newcomer))
    if 1.0 - shortest_s / after_s > context.config.waiting_part_max:
        return None
    return stretch([*turns, newcomer], after_s) - stretch(turns, before_s)
