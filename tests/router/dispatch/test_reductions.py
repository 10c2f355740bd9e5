"""Scalars of a whole batch do not depend on how its rows were split."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl import losses
from plexrl.errors import DeviceMemoryFullError
from plexrl.router.dispatch.reductions import (
    cause_of,
    gather_metrics,
    gather_moves,
    loss_denominator,
    non_finite_error,
    row_masks,
)
from plexrl.wire.messages import Failed
from plexrl.wire.operations import OperationKind


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_denominators_cover_the_whole_batch(lengths: list[int]) -> None:
    total = sum(lengths)
    mask = (np.arange(total) % 3 > 0).astype(np.float32)
    arrays = {"mask": mask, "lengths": np.array(lengths, dtype=np.int32)}
    masks = [row[1:] for row in np.split(mask, np.cumsum(lengths)[:-1])]
    tokens = sum(float(row.sum()) for row in masks)
    used = sum(bool((row > 0).any()) for row in masks)
    assert loss_denominator(losses.ppo(), arrays) == pytest.approx(max(tokens, 1e-9))
    assert loss_denominator(losses.grpo(), arrays) == pytest.approx(max(used, 1e-9))
    assert loss_denominator(losses.custom(), {}) == 1.0
    assert row_masks(mask, arrays["lengths"]).tolist() == [float(row.sum()) for row in masks]


def test_metrics_do_not_depend_on_the_split() -> None:
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


def test_every_rank_that_moved_memory_counts_once_and_the_slowest_sets_the_time() -> None:
    moved = gather_moves(
        [
            {"bytes_moved": 3, "seconds": 0.5, "tier": "host", "memory_before": {"rss_bytes": 1}}
            | {"prefetched_bytes": 2, "prefetch_s": 0.1},
            {"bytes_moved": 4, "seconds": 0.25, "tier": "nvme", "memory_before": {"rss_bytes": 2}}
            | {"prefetched_bytes": 0, "prefetch_s": 0.0},
        ]
    )
    assert moved == {
        "prefetched_bytes": 2,
        "prefetch_s": 0.1,
        "bytes_moved": 7,
        "seconds": 0.5,
        "tier": "nvme",
        "memory_before": [{"rss_bytes": 1}, {"rss_bytes": 2}],
    }


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (OperationKind.FORWARD, "logprobs"),
        (OperationKind.FORWARD, "scores"),
        (OperationKind.GENERATE, "logprobs"),
    ],
)
def test_numbers_that_are_not_finite_are_never_a_success(
    kind: OperationKind, name: str, bad: float
) -> None:
    values = np.array([-1.0, bad, -2.0], dtype=np.float32)
    error = non_finite_error(kind, {name: values})
    assert error is not None
    assert f"{kind.value} computed numbers that are not finite" in error.message
    assert non_finite_error(kind, {name: values[::2]}) is None


def test_a_lack_of_device_memory_is_reported_before_what_it_caused() -> None:
    cut, refused, other = (
        Failed(operation="o", token=1, error={"code": code, "message": "", "details": {}})
        for code in ("connection_lost", DeviceMemoryFullError.code, "device")
    )
    assert cause_of([cut, refused]) == refused.error
    assert cause_of([cut, other]) == cut.error


def test_a_sync_of_which_one_rank_pulled_a_delta_is_one() -> None:
    full, delta = (
        {"bytes_moved": 4, "seconds": 1.0, "tier": "host", "bytes_wanted": 8, "way": way}
        | {"sources": {"tcp": 4}}
        for way in ("full", "delta")
    )
    assert gather_moves([full, delta])["way"] == "delta"
    assert gather_moves([full, full])["way"] == "full"
