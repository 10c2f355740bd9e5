"""Balanced loads: never worse than longest-first, near the bound, optimal for small inputs."""

import heapq
from collections.abc import Sequence
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plexrl.router.dispatch.balance import CLOSE_ENOUGH, balanced, lower_bound

costs_of_rows = st.lists(st.integers(1, 60), max_size=40)


def fullest(costs: Sequence[int], parts: list[list[int]]) -> int:
    return max(sum(costs[index] for index in part) for part in parts)


def longest_first(costs: Sequence[int], parts: int) -> int:
    loads = [0] * parts
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


@given(costs_of_rows, st.integers(1, 16))
def test_every_item_is_in_one_part_and_the_fullest_is_bounded(costs: list[int], count: int) -> None:
    parts = balanced(costs, count)
    assert len(parts) == count
    assert all(part == sorted(part) for part in parts)
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    assert lower_bound(costs, count) <= fullest(costs, parts) <= longest_first(costs, count)
    assert balanced(costs, count) == parts


def test_random_batches_are_no_fuller_than_with_longest_first() -> None:
    for seed in range(200):
        random = np.random.default_rng(seed)
        costs = random.lognormal(3.0, 1.2, random.integers(6, 120)).astype(int) + 1
        count = int(random.integers(2, 16))
        parts = balanced(costs.tolist(), count)
        assert fullest(costs.tolist(), parts) <= longest_first(costs.tolist(), count), seed


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_small_loads_are_within_a_third_of_the_best_and_above_the_bound(
    costs: list[int], count: int
) -> None:
    best = min(
        max(
            sum(cost for cost, part in zip(costs, chosen, strict=True) if part == each)
            for each in range(count)
        )
        for chosen in product(range(count), repeat=len(costs))
    )
    assert lower_bound(costs, count) <= best
    assert best <= fullest(costs, balanced(costs, count)) <= best * 4 / 3


def test_exchanges_find_what_longest_first_misses() -> None:
    costs = [5, 5, 4, 4, 3, 3, 3]
    assert longest_first(costs, 3) == 11
    assert fullest(costs, balanced(costs, 3)) == 9
    assert fullest([3, 3, 2, 2, 2], balanced([3, 3, 2, 2, 2], 2)) == 6


def test_typical_batches_are_near_the_lower_bound() -> None:
    random = np.random.default_rng(0)
    for rows, count in ((64, 8), (256, 8), (1000, 16), (4000, 64)):
        costs = random.lognormal(5.5, 0.8, rows).clip(8, 4096).astype(int).tolist()
        reached, bound = fullest(costs, balanced(costs, count)), lower_bound(costs, count)
        assert reached <= bound * (1 + 10 * CLOSE_ENOUGH), (rows, count)


def test_one_item_more_than_parts_puts_two_of_them_together() -> None:
    assert lower_bound([6, 6, 6], 2) == 12
    assert lower_bound([9, 6, 5, 1], 2) == 11
