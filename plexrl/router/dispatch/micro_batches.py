"""Rows of one data-parallel rank to micro-batches of a bounded number of tokens. Pure.

Two kinds of backend differ in what a micro-batch costs. One that pads lays rows of similar length
side by side, each as long as the longest, and cuts them itself, given a count. One that packs lays
rows end to end and is told which rows go together. A row longer than the bound makes a micro-batch
of its own for both. All ranks run the same number, because each takes part in the others'
collectives.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from plexrl.wire.tensors import Array


def padded_count(lengths: Array, bound: int) -> int:
    """The fewest micro-batches into which a worker cuts rows so that none exceeds `bound` tokens
    with padding; at least 1."""
    ordered = np.sort(lengths.astype(np.int64))
    # More micro-batches never make one larger (a group's last row stays in a group as long, or
    # moves to a shorter one), so the first count that fits can be searched by halves.
    low, high = 1, max(1, len(ordered))
    while low < high:
        middle = (low + high) // 2
        if _fits(ordered, middle, bound):
            high = middle
        else:
            low = middle + 1
    return low


def packed_count(costs: Sequence[int], bound: int) -> int:
    """Micro-batches that `packed` needs at least for rows of these costs; at least 1."""
    return max(1, len(_best_fit(costs, bound)))


def packed(costs: Sequence[int], count: int, bound: int) -> list[list[int]]:
    """Exactly `count` lists of indices, none above `bound` unless by one row alone, the heaviest
    first, so that the ranks of a collective come to it after like work. Some may be empty.

    `count` is at least `packed_count` of the same rows.
    """
    groups = _evenly(costs, count)
    if any(len(group) > 1 and _total(costs, group) > bound for group in groups):
        groups = _best_fit(costs, bound)
        assert len(groups) <= count
        groups += [[] for _ in range(count - len(groups))]
    groups = [sorted(group) for group in groups]
    groups.sort(key=lambda group: (-_total(costs, group), group))
    return groups


def _fits(ordered: Array, count: int, bound: int) -> bool:
    """Whether sorted rows cut into `count` groups, as workers cut them, stay within the bound."""
    small, larger = divmod(len(ordered), count)
    if small == 0:
        return True
    # `array_split`: the first groups have a row more than the others.
    sizes = np.full(count, small)
    sizes[:larger] += 1
    longest = ordered[np.cumsum(sizes) - 1]
    return bool(((sizes <= 1) | (sizes * longest <= bound)).all())


def _best_fit(costs: Sequence[int], bound: int) -> list[list[int]]:
    """The longest rows first, each into the fullest group that still has room for it: at most
    11/9 of the fewest groups, and one more."""
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """(tokens left, group), sorted."""
    for index in _longest_first(costs):
        at = bisect_left(room, (costs[index], -1))
        if at < len(room):
            left, group = room.pop(at)
            groups[group].append(index)
        else:
            left, group = bound, len(groups)
            groups.append([index])
        if left > costs[index]:
            insort(room, (left - costs[index], group))
    return groups


def _evenly(costs: Sequence[int], count: int) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, group) for group in range(count)]
    for index in _longest_first(costs):
        load, group = loads[0]
        groups[group].append(index)
        heapq.heapreplace(loads, (load + costs[index], group))
    return groups


def _longest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))


def _total(costs: Sequence[int], group: Sequence[int]) -> int:
    return sum(costs[index] for index in group)
