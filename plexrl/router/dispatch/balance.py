"""Loads over equal parts, so that the fullest part is as light as can cheaply be had. Pure.

Longest processing time first keeps the fullest part within 4/3 of the best there is; exchanges
between parts then close most of what is left. The differencing method (Karmarkar and Karp) starts
nearer to the best but costs `parts` times as much for each item, and exchanges end at the same.
"""

import heapq
from bisect import insort
from collections.abc import Sequence

import numpy as np

CLOSE_ENOUGH = 1 / 400
"""Of the lower bound: a fullest part so near to it is not worked on."""

ROUNDS_PER_PART = 4
"""Exchanges that are tried at most, for each part."""

PARTNERS = 8
"""Lightest parts that the fullest one looks for an exchange with."""


def balanced(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `costs` in `parts` lists, each sorted. Deterministic, O(n log n).

    No part is fuller than by longest processing time first.
    """
    assigned = _longest_first(costs, parts)
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
    """What the fullest of `parts` cannot be below: the mean, the largest item, and the two
    smallest of the `parts` + 1 largest, two of which must share a part."""
    if not len(costs):
        return 0
    bound = max(-(-sum(costs) // parts), max(costs))
    if len(costs) > parts:
        largest = heapq.nlargest(parts + 1, costs)
        bound = max(bound, largest[-1] + largest[-2])
    return bound


def _longest_first(costs: Sequence[int], parts: int) -> list[list[int]]:
    assigned: list[list[int]] = [[] for _ in range(parts)]
    if parts == 1:
        assigned[0] = list(range(len(costs)))
        return assigned
    loads = [(0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, part = loads[0]
        assigned[part].append(index)
        heapq.heapreplace(loads, (load + costs[index], part))
    return assigned


def _exchange(kept: list[list[tuple[int, int]]], loads: list[int], fullest: int) -> bool:
    """Give an item of the fullest part away, for a smaller one or none, where both parts then are
    lighter than it was. False where no such exchange is found."""
    given = np.array([cost for cost, _ in kept[fullest]])
    others = sorted((part for part in range(len(loads)) if part != fullest), key=loads.__getitem__)
    for part in others[:PARTNERS]:
        gap = loads[fullest] - loads[part]
        if gap < 2:
            break
        # Taking nothing back is an item of cost 0.
        taken = np.array([0, *(cost for cost, _ in kept[part])])
        # The pair is even where what changes hands is half of the gap; nothing is won where it is
        # none of the gap, or all of it and more.
        near = np.searchsorted(taken, given - gap // 2)
        places = np.stack([near - 1, near]).clip(0, len(taken) - 1)
        change = given - taken[places]
        uneven = np.abs(2 * change - gap)
        side, at = divmod(int(uneven.argmin()), len(given))
        if uneven[side, at] < gap:
            _swap(kept, loads, (fullest, at), (part, int(places[side, at]) - 1))
            return True
    return False


def _swap(
    kept: list[list[tuple[int, int]]],
    loads: list[int],
    giver: tuple[int, int],
    taker: tuple[int, int],
) -> None:
    """Change items by (part, place); place -1 of the taker gives nothing back."""
    (fullest, at), (part, place) = giver, taker
    mine = kept[fullest].pop(at)
    handed = mine[0]
    if place >= 0:
        theirs = kept[part].pop(place)
        insort(kept[fullest], theirs)
        handed -= theirs[0]
    insort(kept[part], mine)
    loads[fullest] -= handed
    loads[part] += handed
