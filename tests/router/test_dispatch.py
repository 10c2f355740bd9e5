"""The dispatch plan: every row to one rank, every answer back in its place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl import losses
from plexrl.router.dispatch import (
    gather_metrics,
    join_per_token,
    loss_denominator,
    micro_batch_count,
    rank_arrays,
    split_rows,
)
from plexrl.wire.tensors import Arrays

batches = st.lists(st.integers(1, 40), min_size=1, max_size=40)
ranks = st.integers(1, 16)


def arrays_of(lengths: list[int]) -> Arrays:
    total = sum(lengths)
    return {
        "tokens": np.arange(total, dtype=np.int32),
        "lengths": np.array(lengths, dtype=np.int32),
        "mask": (np.arange(total) % 3 > 0).astype(np.float32),
    }


@given(batches, ranks)
def test_every_row_goes_to_one_rank_and_results_come_back_in_order(
    lengths: list[int], count: int
) -> None:
    split = split_rows(lengths, count)
    assert sorted(row for rows in split.rows for row in rows) == list(range(len(lengths)))
    parts = rank_arrays(arrays_of(lengths), split)
    assert all(int(part["lengths"].sum()) == len(part["tokens"]) for part in parts)
    joined = join_per_token([part["tokens"].astype(np.float32) for part in parts], split)
    assert joined.tolist() == list(range(sum(lengths)))


@given(batches, ranks)
def test_no_rank_gets_much_more_than_its_share(lengths: list[int], count: int) -> None:
    split = split_rows(lengths, count)
    loads = [sum(lengths[row] for row in rows) for rows in split.rows]
    ideal = max(sum(lengths) / count, max(lengths))
    assert max(loads) <= 4 / 3 * ideal + 1e-9 or max(loads) - min(loads) <= max(lengths)


@given(batches, ranks, st.integers(8, 400))
def test_micro_batches_stay_within_their_bound_on_every_rank(
    lengths: list[int], count: int, bound: int
) -> None:
    split = split_rows(lengths, count)
    pieces = micro_batch_count(split, bound)
    for rows in split.rows:
        groups = np.array_split(np.array(sorted(lengths[row] for row in rows)), pieces)
        for group in groups:
            assert len(group) <= 1 or len(group) * int(group[-1]) <= bound


@given(batches)
def test_denominators_are_those_of_the_whole_batch(lengths: list[int]) -> None:
    arrays = arrays_of(lengths)
    rows = np.split(arrays["mask"], np.cumsum(lengths)[:-1])
    masks = [row[1:] for row in rows]
    tokens = sum(float(mask.sum()) for mask in masks)
    used = sum(bool((mask > 0).any()) for mask in masks)
    assert loss_denominator(losses.ppo(), arrays) == pytest.approx(max(tokens, 1e-9))
    assert loss_denominator(losses.grpo(), arrays) == pytest.approx(max(used, 1e-9))
    assert loss_denominator(losses.custom(), {}) == 1.0


def test_metrics_are_those_of_the_batch_however_it_was_split() -> None:
    gathered = gather_metrics(
        [
            {"sums": {"loss": 0.5, "tokens": 3, "ratio": 3.3}, "maxes": {"peak": 2.0}},
            {"sums": {"loss": 0.25, "tokens": 1, "ratio": 0.9}, "maxes": {"peak": 5.0}},
        ]
    )
    metrics = gathered["metrics"]
    assert metrics == {
        "loss": 0.75,
        "tokens": 4.0,
        "peak": 5.0,
        "ratio": pytest.approx(1.05),
    }
