"""Balances loads over equal parts, so that the fullest part is nearly as light as possible. Pure.

Longest-processing-time-first keeps the fullest part within 4/3 of the optimum; exchanges between
parts then close most of the rest. The differencing method (Karmarkar and Karp) starts nearer to the
optimum but costs `parts` times as much for each item, and exchanges end at the same result.
"""

import heapq
from bisect import insort
from collections.abc import Sequence

import numpy as np

CLOSE_ENOUGH = 1 / 400
"""Relative distance of the fullest part from the lower bound at which the search stops."""

ROUNDS_PER_PART = 4
"""Most exchanges, for each part."""

PARTNERS = 8
"""Number of lightest parts that the fullest part tries to exchange with."""


def balanced(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Distribute indices of `costs` over `parts` sorted lists. Deterministic, O(n log n).

    No part is fuller than the fullest part of longest-processing-time-first.
    """
    assigned = longest_first(costs, parts)
    bound = lower_bound(costs, parts)
    kept = [sorted((costs[index], index) for index in indices) for indices in assigned]
    loads = [sum(cost for cost, _ in items) for items in kept]
    for _ in range(ROUNDS_PER_PART * parts):
        fullest = max(range(parts), key=loads.__getitem__)
        if loads[fullest] <= bound * (1 + CLOSE_ENOUGH):
            break
        if not _exchange(kept, loads, fullest):
            break
    return [sorted(index for _, index in items) for items in kept]


def lower_bound(costs: Sequence[int], parts: int) -> int:
    """A lower bound on the fullest of `parts`: the mean, the largest item, and the sum of the two
    smallest of the `parts` + 1 largest items, two of which must share a part."""
    if not len(costs):
        return 0
    bound = max(-(-sum(costs) // parts), max(costs))
    if len(costs) > parts:
        largest = heapq.nlargest(parts + 1, costs)
        bound = max(bound, largest[-1] + largest[-2])
    return bound


def longest_first(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Distribute indices of `costs` over `parts` lists: the largest cost first, each to the list
    with the least so far. Deterministic."""
    assigned: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for index in by_cost(costs):
        load, part = loads[0]
        assigned[part].append(index)
        heapq.heapreplace(loads, (load + costs[index], part))
    return assigned


def by_cost(costs: Sequence[int]) -> list[int]:
    """Indices of `costs`, the largest cost first."""
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))


def _exchange(kept: list[list[tuple[int, int]]], loads: list[int], fullest: int) -> bool:
    """Move an item out of the fullest part, in exchange for a smaller one or none, if both parts
    are then lighter than the fullest was. Returns whether such an exchange was found."""
    given = np.array([cost for cost, _ in kept[fullest]])
    others = sorted((part for part in range(len(loads)) if part != fullest), key=loads.__getitem__)
    for part in others[:PARTNERS]:
        gap = loads[fullest] - loads[part]
        if gap < 2:
            break
        # Receiving nothing is an item of cost 0.
        taken = np.array([0, *(cost for cost, _ in kept[part])])
        # The two parts are even if the moved cost is half of the gap; a moved cost of 0, or of at
        # least the whole gap, gains nothing.
        near = np.searchsorted(taken, given - gap // 2)
        indices = np.stack([near - 1, near]).clip(0, len(taken) - 1)
        change = given - taken[indices]
        uneven = np.abs(2 * change - gap)
        side, at = divmod(int(uneven.argmin()), len(given))
        if uneven[side, at] < gap:
            _swap(kept, loads, (fullest, at), (part, int(indices[side, at]) - 1))
            return True
    return False


def _swap(
    kept: list[list[tuple[int, int]]],
    loads: list[int],
    giver: tuple[int, int],
    taker: tuple[int, int],
) -> None:
    """Exchange items given as (part, index); index -1 of the taker returns nothing."""
    (fullest, at), (part, index) = giver, taker
    mine = kept[fullest].pop(at)
    handed = mine[0]
    if index >= 0:
        theirs = kept[part].pop(index)
        insort(kept[fullest], theirs)
        handed -= theirs[0]
    insort(kept[part], mine)
    loads[fullest] -= handed
    loads[part] += handed
