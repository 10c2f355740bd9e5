"""Groups the rows of one data-parallel rank into micro-batches of bounded size. Pure.

A backend that pads puts rows of similar length side by side, each as long as the longest. It splits
the rows itself and receives only a count. A backend that packs concatenates rows and receives the
rows of each micro-batch. For both, a row longer than the bound is a micro-batch of its own. All
ranks run the same number of micro-batches, because each takes part in the others' collectives.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from plexrl.router.dispatch.balance import by_cost, longest_first
from plexrl.wire.tensors import Array


def padded_count(lengths: Array, bound: int) -> int:
    """The fewest micro-batches such that none exceeds `bound` tokens with padding; at least 1."""
    ordered = np.sort(lengths.astype(np.int64))
    # More micro-batches never make one larger (a group's last row stays in a group as long, or
    # moves to a shorter one), so a binary search finds the first count that fits.
    low, high = 1, max(1, len(ordered))
    while low < high:
        middle = (low + high) // 2
        if _fits(ordered, middle, bound):
            high = middle
        else:
            low = middle + 1
    return low


def packed_count(costs: Sequence[int], bound: int) -> int:
    """The fewest micro-batches that `packed` needs for rows of these costs; at least 1."""
    return max(1, len(_best_fit(costs, bound)))


def packed(costs: Sequence[int], count: int, bound: int) -> list[list[int]]:
    """Exactly `count` lists of indices, each within `bound` unless it is a single row. The heaviest
    list comes first, so that ranks reach each collective after similar work. Lists may be empty.

    `count` is at least `packed_count` of the same rows.
    """
    groups = longest_first(costs, count)
    if any(len(group) > 1 and _total(costs, group) > bound for group in groups):
        groups = _best_fit(costs, bound)
        assert len(groups) <= count
        groups += [[] for _ in range(count - len(groups))]
    groups = [sorted(group) for group in groups]
    groups.sort(key=lambda group: (-_total(costs, group), group))
    return groups


def _fits(ordered: Array, count: int, bound: int) -> bool:
    """Whether sorted rows, split into `count` groups as workers split them, fit the bound."""
    small, larger = divmod(len(ordered), count)
    if small == 0:
        return True
    # As `array_split`: the first groups have one row more than the others.
    sizes = np.full(count, small)
    sizes[:larger] += 1
    longest = ordered[np.cumsum(sizes) - 1]
    return bool(((sizes <= 1) | (sizes * longest <= bound)).all())


def _best_fit(costs: Sequence[int], bound: int) -> list[list[int]]:
    """Best fit decreasing: the longest rows first, each into the fullest group with enough
    capacity. At most 11/9 of the fewest groups, plus one."""
    groups: list[list[int]] = []
    capacities: list[tuple[int, int]] = []
    """(tokens left, group), sorted."""
    for index in by_cost(costs):
        at = bisect_left(capacities, (costs[index], -1))
        if at < len(capacities):
            left, group = capacities.pop(at)
            groups[group].append(index)
        else:
            left, group = bound, len(groups)
            groups.append([index])
        if left > costs[index]:
            insort(capacities, (left - costs[index], group))
    return groups


def _total(costs: Sequence[int], group: Sequence[int]) -> int:
    return sum(costs[index] for index in group)
