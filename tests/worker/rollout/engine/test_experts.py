"""A layer's experts: the grouped pass against a loop over tokens, and divided among ranks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from plexrl.errors import InvalidRequestError
from plexrl.worker.models.shards import box_of
from plexrl.worker.rollout.engine.forward.experts import Experts
from plexrl.worker.rollout.engine.tensor_parallel import RankGroup
from tests.examples import examples

EXPERTS, HIDDEN, WIDTH, PER_TOKEN = 8, 16, 24, 3
NAME = "model.layers.0.mlp.experts"


def block_of(seed: int, normalizes: bool) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        moe_intermediate_size=WIDTH,
        norm_topk_prob=normalizes,
    )
    made = Qwen3MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
        parameter.requires_grad_(False)
    return made


def by_loop(block: Any, inputs: torch.Tensor, normalizes: bool) -> torch.Tensor:
    """What the definition says, one token after another."""
    rows = []
    for token in inputs:
        scores = (block.gate.weight @ token).softmax(-1)
        best = sorted(range(EXPERTS), key=lambda each: -float(scores[each]))[:PER_TOKEN]
        total = sum(scores[each] for each in best) if normalizes else 1.0
        row = torch.zeros(HIDDEN)
        for each in best:
            gate, up = (block.experts.gate_up_proj[each] @ token).chunk(2)
            row += (
                scores[each]
                / total
                * (block.experts.down_proj[each] @ (gate.sigmoid() * gate * up))
            )
        rows.append(row)
    return torch.stack(rows)


def share_of(block: Any, group: RankGroup) -> nn.Module:
    """The block as a rank of `group` keeps it."""
    own = block_of(0, normalizes=False)
    own.gate = block.gate
    for name in ("gate_up_proj", "down_proj"):
        whole = getattr(block.experts, name).data
        box = box_of(f"{NAME}.{name}", tuple(whole.shape), group.share, group.shares)
        getattr(own.experts, name).data = whole[box.index].clone()
    assert isinstance(own, nn.Module)
    return own


@given(st.integers(0, 99), st.integers(1, 40), st.booleans())
@settings(max_examples=examples(20), deadline=None)
def test_the_grouped_pass_is_the_loop_over_tokens_however_ranks_divide_the_experts(
    seed: int, tokens: int, normalizes: bool
) -> None:
    block = block_of(seed, normalizes)
    inputs = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    wanted = by_loop(block, inputs, normalizes)
    assert torch.allclose(Experts(block)(inputs), wanted, atol=1e-4)
    groups: list[tuple[int, int, tuple[int, ...]]] = [(size, 1, ()) for size in (1, 2, 4, 8)]
    # Four ranks that keep halves, and a switch's order of ranks.
    groups += [(4, 2, (0, 2, 1, 3)), (2, 2, (0, 1))]
    for size, splits, order in groups:
        ranks = [RankGroup(rank=r, size=size, splits=splits, order=order) for r in range(size)]
        found = torch.stack([Experts(share_of(block, rank), rank)(inputs) for rank in ranks])
        assert torch.allclose(found.sum(0), wanted, atol=1e-4), (size, splits)


def test_an_update_in_place_reaches_the_experts() -> None:
    block, other = block_of(1, normalizes=True), block_of(2, normalizes=True)
    experts, inputs = Experts(block), torch.ones(2, HIDDEN)
    for home, new in zip(block.parameters(), other.parameters(), strict=True):
        home.copy_(new)
    assert torch.equal(experts(inputs), Experts(other)(inputs))


def test_experts_that_ranks_cannot_divide_are_refused() -> None:
    shape = (EXPERTS, 2 * WIDTH, HIDDEN)
    with pytest.raises(InvalidRequestError, match="gate_up_proj has 8 experts, which 3 tensor-"):
        box_of(f"{NAME}.gate_up_proj", shape, 1, 3)
