"""Rows in one call of attention attend as each of them does alone."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from plexrl.model.parallelism import Parallelism
from plexrl.router.dispatch.plan import plan_batch
from plexrl.worker.batches.packed_batches import packed_micro_batches
from plexrl.worker.training.megatron.packed_rows import RowMap, pack_rows
from tests.examples import examples
from tests.worker.batches.test_packed_batches import batch
from tests.worker.training.megatron.tolerances import TOLERANCES, check_near

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def row_map(lengths: list[int]) -> RowMap:
    plan = plan_batch(Parallelism(), lengths, micro_batch_tokens=sum(lengths), packs=True)
    (only,) = packed_micro_batches(plan.inputs(batch(lengths))[0], 1)
    return pack_rows(only).row_map


def row_by_row(rows: RowMap, *query_key_value: torch.Tensor) -> torch.Tensor:
    found = []
    split = (torch.split(each, list(rows.lengths)) for each in query_key_value)
    for row in zip(*split, strict=True):
        query, key, value = (each.squeeze(1).transpose(0, 1)[None] for each in row)
        output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        found.append(output[0].transpose(0, 1).flatten(1).unsqueeze(1))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@settings(max_examples=examples(15), deadline=None)
@given(lengths=st.lists(st.integers(2, 90), min_size=1, max_size=8))
@example(lengths=[64, 71, 72, 127, 2, 3, 128])
def test_grouped_rows_attend_as_each_does_alone(lengths: list[int], dtype: torch.dtype) -> None:
    pytest.importorskip("megatron.core")
    from plexrl.worker.training.megatron.network.attention import PackedAttention

    torch.manual_seed(sum(lengths))
    rows = row_map(lengths)
    attention = PackedAttention(SimpleNamespace(softmax_scale=None), SimpleNamespace(cp=None))
    leaves = [
        torch.randn(sum(lengths), 1, heads, WIDTH).to(dtype).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    exact = [each.detach().float().requires_grad_() for each in leaves]
    output = attention(*leaves, rows)
    wanted = row_by_row(rows, *exact)
    gradient = torch.randn_like(output)
    torch.autograd.backward(output, gradient)
    torch.autograd.backward(wanted, gradient.float())
    gradients = ((one.grad, other.grad) for one, other in zip(leaves, exact, strict=True))
    check_near([(output, wanted), *gradients], dtype)
