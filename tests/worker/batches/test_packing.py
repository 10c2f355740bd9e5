"""Micro-batches hold every token once, in rows of similar length, and can be put back."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from plexrl.worker.batches.packing import micro_batches, unpack


@given(st.lists(st.integers(1, 12), max_size=20), st.integers(1, 5))
def test_packing_and_unpacking_restores_the_order(lengths: list[int], count: int) -> None:
    total = sum(lengths)
    arrays = {
        "tokens": np.arange(total, dtype=np.int32),
        "lengths": np.array(lengths, dtype=np.int32),
        "mask": np.linspace(0, 1, total, dtype=np.float32),
    }
    batches = micro_batches(arrays, count)
    assert len(batches) == count
    assert sum(int(batch.valid_BL.sum()) for batch in batches) == total
    restored = unpack(batches, [batch.tokens_BL.float() for batch in batches], total)
    assert restored.tolist() == list(range(total))
    masks = unpack(batches, [batch.per_token_BL["mask"] for batch in batches], total)
    assert np.array_equal(masks, arrays["mask"])


def test_a_rank_without_rows_still_has_something_to_run() -> None:
    (batch,) = micro_batches({}, 1)
    assert batch.tokens_BL.shape == (1, 2)
    assert not bool(batch.valid_BL.any())
    assert unpack([batch], [torch.zeros(1, 2)], 0).shape == (0,)
