"""What the dispatch plan sends a packing rank, as micro-batches, and the way back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plexrl
from plexrl.model.parallelism import Parallelism
from plexrl.router.dispatch.plan import plan_batch
from plexrl.router.dispatch.reductions import loss_denominator
from plexrl.wire.operations import LossSpec
from plexrl.wire.tensors import Arrays
from plexrl.worker.batches.losses import compute_loss
from plexrl.worker.batches.packed_batches import packed_micro_batches
from plexrl.worker.batches.packing import micro_batches, unpack
from tests.examples import examples


def batch(lengths: list[int]) -> Arrays:
    """Every token its own number; its logprob is a function of the number."""
    total = sum(lengths)
    rng = np.random.default_rng(total)
    return {
        "tokens": np.arange(1, total + 1, dtype=np.int32),
        "lengths": np.array(lengths, dtype=np.int32),
        "mask": (rng.random(total) < 0.7).astype(np.float32),
        "logprobs": rng.normal(-1, 0.2, total).astype(np.float32),
        "prox_logprobs": rng.normal(-1, 0.2, total).astype(np.float32),
        "advantages": rng.normal(0, 1, total).astype(np.float32),
    }


def logprob(tokens: torch.Tensor) -> torch.Tensor:
    return -(tokens.float() % 7) / 7


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    dp=st.integers(1, 3),
    cp=st.integers(1, 3),
    loss=st.sampled_from(
        [
            plexrl.losses.grpo(),
            plexrl.losses.dapo(),
            plexrl.losses.decoupled_ppo(sequence_range=(0.9, 1.1)),
        ]
    ),
)
def test_results_and_losses_are_those_of_whole_rows(
    lengths: list[int], dp: int, cp: int, loss: LossSpec
) -> None:
    arrays = batch(lengths)
    plan = plan_batch(Parallelism(dp=dp, cp=cp), lengths, micro_batch_tokens=10, packs=True)
    denominator = loss_denominator(loss, arrays)
    total, results = 0.0, {}
    for rank, part in enumerate(plan.inputs(arrays)):
        found, values = packed_micro_batches(part, cp), []
        assert len(found) == plan.micro_batches
        for each in found:
            if each.targets_BL is None:
                value_BL = logprob(each.tokens_BL) * each.valid_BL
                value_BL[:, 0] = 0
            else:
                has_target_BL = each.targets_BL >= 0
                value_BL = (logprob(each.targets_BL) * has_target_BL).roll(1, dims=1)
            inputs = each.per_token_BL | each.row_sums_B
            total += float(compute_loss(loss, value_BL, inputs, denominator).loss)
            values.append(value_BL)
        results[rank] = unpack(found, values, len(part["tokens"]))
    (whole,) = micro_batches(arrays, 1)
    wanted_BL = logprob(whole.tokens_BL) * whole.valid_BL
    wanted_BL[:, 0] = 0
    assert np.allclose(plan.join(results), unpack([whole], [wanted_BL], sum(lengths)))
    wanted = float(compute_loss(loss, wanted_BL, whole.per_token_BL, denominator).loss)
    assert total == pytest.approx(wanted, rel=1e-4, abs=1e-5)
