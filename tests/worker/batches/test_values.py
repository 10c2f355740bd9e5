"""The value loss against its formula in plain torch, and values in the places of logprobs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl import losses
from plexrl.errors import InvalidRequestError
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.operations import DEFAULT_REDUCTION, LossSpec, loss_inputs
from plexrl.wire.parameter_checks import check_loss
from plexrl.worker.batches.logprobs import Wanted
from plexrl.worker.batches.losses import compute_loss
from plexrl.worker.batches.packing import micro_batches
from plexrl.worker.batches.values import outputs_of_tokens
from tests.examples import examples
from tests.worker.training.ranks import batch

ROWS, TOKENS = 3, 5
SPECS = [
    losses.value(),
    losses.value(clip=None),
    losses.value(clip=0.1, reduction="sequence_mean"),
    losses.value(clip=0.3, reduction="sum"),
]


def some_inputs(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    new, old, returns = torch.randn((3, ROWS, TOKENS), generator=generator)
    mask = (torch.rand((ROWS, TOKENS), generator=generator) > 0.4).float()
    return 0.5 * new, {"mask": mask, "values": 0.5 * old, "returns": returns}


def written_out(
    spec: LossSpec, values: torch.Tensor, inputs: dict[str, torch.Tensor], denominator: float
) -> torch.Tensor:
    """Row by row, as PPO's implementations have it."""
    total = torch.zeros(())
    for row in range(ROWS):
        used = (inputs["mask"][row] > 0) & (torch.arange(TOKENS) > 0)
        new, old, target = (
            each[row][used] for each in (values, inputs["values"], inputs["returns"])
        )
        terms = (new - target) ** 2
        if spec.value_clip is not None:
            bounded = old + torch.clip(new - old, -spec.value_clip, spec.value_clip)
            terms = torch.max(terms, (bounded - target) ** 2)
        by_row = (spec.reduction or DEFAULT_REDUCTION[spec.name]) == "sequence_mean"
        total = total + 0.5 * terms.sum() / (max(1, len(new)) if by_row else 1)
    return total / denominator


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.value_clip}-{s.reduction}")
@given(seed=st.integers(0, 10_000))
@settings(max_examples=examples(40), deadline=None)
def test_the_value_loss_and_its_gradient_are_those_of_plain_torch(
    spec: LossSpec, seed: int
) -> None:
    values, inputs = some_inputs(seed)
    own, other = (values.clone().requires_grad_(True) for _ in range(2))
    found = compute_loss(spec, own, inputs, 3.0, output="value")
    wanted = written_out(spec, other, inputs, 3.0)
    assert torch.allclose(found.loss, wanted, atol=1e-6)
    found.loss.backward()  # type: ignore[no-untyped-call]
    wanted.backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    grad = torch.zeros_like(values) if other.grad is None else other.grad
    assert torch.allclose(own.grad, grad, atol=1e-6)
    mask = inputs["mask"].clone()
    mask[:, 0] = 0
    assert float(found.sums["value"]) == pytest.approx(float((mask * values).sum()), abs=1e-5)
    assert "logprob" not in found.sums


def test_a_value_that_moved_further_than_the_clip_towards_its_return_gets_no_gradient() -> None:
    inputs = {name: torch.zeros(1, 2) for name in ("values", "returns")}
    inputs |= {"mask": torch.ones(1, 2), "returns": torch.ones(1, 2)}
    values = torch.full((1, 2), 0.5, requires_grad=True)
    found = compute_loss(losses.value(clip=0.2), values, inputs, 1.0)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert not values.grad.any()
    assert float(found.loss.detach()) == pytest.approx(0.5 * 0.8**2)
    assert float(found.sums["clip_fraction"]) == 1


EVERY = [
    *SPECS,
    losses.cross_entropy(),
    losses.importance_sampling(),
    losses.ppo(entropy_coef=0.1),
    losses.grpo(kl_coef=0.2, entropy_coef=0.1),
    losses.dapo(),
    losses.dr_grpo(),
    losses.gspo(kl_coef=0.2),
    losses.cispo(kl_coef=0.2),
    losses.reinforce(kl_coef=0.2),
    losses.decoupled_ppo(weight_cap=1.5, token_range=(0.3, 3), sequence_range=(0.5, 2)),
    losses.custom(),
]


@pytest.mark.parametrize("spec", EVERY, ids=lambda s: f"{s.name}-{s.value_clip}-{s.reduction}")
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
@settings(max_examples=examples(20), deadline=None)
def test_the_sum_over_micro_batches_and_ranks_is_the_loss_of_the_whole_batch(
    spec: LossSpec, seed: int, cut: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = 6
    numbers = torch.randn((8, rows, TOKENS), generator=generator) * 0.3
    names = ("logprobs", "prox_logprobs", "ref_logprobs", "advantages", "returns", "values")
    inputs = dict(zip((*names, "weights"), numbers, strict=False))
    inputs["mask"] = (torch.rand((rows, TOKENS), generator=generator) > 0.4).float()
    own, entropy = (numbers[-1] - 1).requires_grad_(True), torch.rand((rows, TOKENS))
    # The denominator of the whole batch, whatever it is, is that of every part.
    whole = compute_loss(spec, own, inputs, 7.0, entropy_BL=entropy)
    parts = [
        compute_loss(
            spec,
            own[part],
            {name: value[part] for name, value in inputs.items()},
            7.0,
            entropy_BL=entropy[part],
        )
        for part in (slice(0, cut), slice(cut, rows))
    ]
    assert torch.allclose(parts[0].loss + parts[1].loss, whole.loss, atol=1e-6)
    (wanted,) = torch.autograd.grad(whole.loss, own, retain_graph=True)
    (found,) = torch.autograd.grad(parts[0].loss + parts[1].loss, own)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert set(parts[0].sums) == set(whole.sums)
    for name, value in whole.sums.items():
        assert torch.allclose(parts[0].sums[name] + parts[1].sums[name], value, atol=1e-4), name


def test_the_batch_needs_its_values_only_for_a_clip() -> None:
    assert loss_inputs(losses.value()) == ("mask", "returns", "values")
    assert loss_inputs(losses.value(clip=None)) == ("mask", "returns")
    for clip in (0.0, math.nan, -1.0):
        with pytest.raises(InvalidRequestError, match="value_clip"):
            check_loss(losses.value(clip=clip))


def test_a_token_has_the_value_of_what_comes_before_it() -> None:
    (rows,) = micro_batches({name: batch(3)[name] for name in ("tokens", "lengths")}, 1)
    outputs = torch.rand(*rows.tokens_BL.shape, 1)
    model = tiny_qwen2("0123456789", head="value")
    found = outputs_of_tokens(model, outputs, rows, Wanted())["values"]
    assert found.shape == rows.tokens_BL.shape
    for row, valid in enumerate(rows.valid_BL.tolist()):
        for t, is_token in enumerate(valid):
            wanted = float(outputs[row, t - 1, 0]) if is_token and t else 0.0
            assert float(found[row, t]) == wanted
