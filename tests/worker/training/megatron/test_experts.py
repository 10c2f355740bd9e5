"""Experts that are multiplied together compute what each of them computes alone."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from plexrl.worker.training.megatron.network.experts import GroupedExperts
from tests.examples import examples
from tests.worker.training.megatron.tolerances import TOLERANCES, check_near

HIDDEN, INNER = 32, 24


def experts_of(count: int, dtype: torch.dtype, device: torch.device) -> GroupedExperts:
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=INNER,
        params_dtype=dtype,
        expert_model_parallel_size=1,
        tensor_model_parallel_size=1,
    )
    experts = GroupedExperts(count, config).to(device)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts


def one_by_one(
    counts: list[int],
    hidden_TH: torch.Tensor,
    probs_T: torch.Tensor,
    gate_up_EFH: torch.Tensor,
    down_EHF: torch.Tensor,
) -> torch.Tensor:
    found = []
    rows = zip(torch.split(hidden_TH, counts), torch.split(probs_T, counts), strict=True)
    for expert, (own_TH, own_T) in enumerate(rows):
        gate, up = (own_TH @ gate_up_EFH[expert].T).chunk(2, dim=-1)
        found.append((silu(gate) * up * own_T[:, None]) @ down_EHF[expert].T)
    return torch.cat(found)


def check_against_one_by_one(counts: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """Outputs and all gradients, within the dtype's tolerance."""
    torch.manual_seed(sum(counts))
    experts = experts_of(len(counts), dtype, device)
    inputs = torch.randn(sum(counts), HIDDEN), torch.rand(sum(counts))
    leaves = [each.to(device, dtype).requires_grad_() for each in inputs]
    leaves += experts.parameters()
    exact = [each.detach().float().requires_grad_() for each in leaves]
    output, _ = experts(leaves[0], torch.tensor(counts), leaves[1])
    wanted = one_by_one(counts, *exact)
    gradient = torch.randn_like(output)
    torch.autograd.backward(output, gradient)
    torch.autograd.backward(wanted, gradient.float())
    gradients = ((one.grad, other.grad) for one, other in zip(leaves, exact, strict=True))
    check_near([(output, wanted), *gradients], dtype)
    for parameter in experts.parameters():
        assert parameter.grad is not None
        for count, own in zip(counts, parameter.grad, strict=True):
            assert bool(own.any()) == (count > 0), "an expert has a gradient if it has tokens"


@settings(max_examples=examples(20), deadline=None)
# The gradient of a single token's probability is one sum, whose terms may cancel.
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(lambda each: sum(each) > 1)
)
@example(counts=[0, 5, 0, 0, 1])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_grouped_experts_compute_what_each_computes_alone(
    counts: list[int], dtype: torch.dtype
) -> None:
    check_against_one_by_one(counts, dtype, torch.device("cpu"))


def test_a_rank_whose_experts_get_no_tokens_still_takes_part_in_the_exchange_of_gradients() -> None:
    experts = experts_of(2, torch.float32, torch.device("cpu"))
    hidden = torch.empty(0, HIDDEN, requires_grad=True)
    probs = torch.empty(0, requires_grad=True)
    output, _ = experts(hidden, torch.tensor([0, 0]), probs)
    torch.autograd.backward(output, torch.empty(0, HIDDEN))
    assert hidden.grad is not None
    assert probs.grad is not None
    assert all(each.grad is None for each in experts.parameters())
