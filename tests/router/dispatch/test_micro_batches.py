"""Micro-batches: within the bound, as few as possible, each row in one."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plexrl.router.dispatch.micro_batches import packed, packed_count, padded_count
from plexrl.worker.batches.packing import micro_batches

lengths_of_rows = st.lists(st.integers(1, 40), max_size=30)
bounds = st.integers(1, 200)


def fits_padded(lengths: Sequence[int], count: int, bound: int) -> bool:
    groups = np.array_split(np.array(sorted(lengths)), count)
    return all(len(group) <= 1 or len(group) * int(group[-1]) <= bound for group in groups)


@given(lengths_of_rows, bounds)
def test_padded_count_is_the_least_that_fits(lengths: list[int], bound: int) -> None:
    tried = next(n for n in range(1, len(lengths) + 2) if fits_padded(lengths, n, bound))
    assert padded_count(np.array(lengths, dtype=np.int64), bound) == tried


@given(lengths_of_rows, bounds, st.integers(0, 3))
def test_a_worker_with_that_count_stays_within_the_bound(
    lengths: list[int], bound: int, more: int
) -> None:
    count = padded_count(np.array(lengths, dtype=np.int64), bound) + more
    arrays = {
        "tokens": np.arange(sum(lengths), dtype=np.int32),
        "lengths": np.array(lengths, dtype=np.int32),
    }
    for batch in micro_batches(arrays, count):
        # Workers pad a single short row, or none, to at least two tokens.
        assert batch.rows == 1 or batch.tokens_BL.numel() <= max(bound, 2 * batch.rows)


@given(lengths_of_rows, bounds, st.integers(0, 3))
def test_each_packed_row_is_in_one_micro_batch_heaviest_first(
    costs: list[int], bound: int, more: int
) -> None:
    count = packed_count(costs, bound) + more
    groups = packed(costs, count, bound)
    assert len(groups) == count
    assert sorted(index for group in groups for index in group) == list(range(len(costs)))
    totals = [sum(costs[index] for index in group) for group in groups]
    assert totals == sorted(totals, reverse=True)
    for group, total in zip(groups, totals, strict=True):
        assert total <= bound or len(group) == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(50, 200))
def test_packing_wastes_few_micro_batches(costs: list[int], bound: int) -> None:
    # Two groups that fit the bound together would have been one.
    assert packed_count(costs, bound) <= 2 * -(-sum(costs) // bound)


def test_rows_that_fit_evenly_are_packed_evenly() -> None:
    assert packed_count([60, 40, 50, 50, 100], 100) == 3
    assert packed_count([1, 99], 100) == 1
    assert packed([60, 40, 50, 50, 100], 3, 100) == [[0, 1], [2, 3], [4]]
    assert packed([10] * 6, 3, 1000) == [[0, 3], [1, 4], [2, 5]]
    # Even token counts alone would put three rows of 30 together.
    assert packed([70, 60, 30, 40], 2, 100) == [[0, 2], [1, 3]]
