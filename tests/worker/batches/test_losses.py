"""The losses against their formulas written out token by token."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl import losses
from plexrl.errors import InvalidRequestError
from plexrl.wire.operations import DEFAULT_REDUCTION, LOSS_INPUTS, LossName, LossSpec
from plexrl.wire.parameter_checks import check_loss
from plexrl.worker.batches.losses import TERMS, compute_loss
from tests.examples import examples

ROWS, TOKENS = 3, 5
NAMES = ("mask", "logprobs", "prox_logprobs", "advantages", "ref_logprobs", "weights")
SPECS = [
    losses.cross_entropy(),
    losses.importance_sampling(),
    losses.ppo(),
    losses.grpo(),
    losses.grpo(kl_coef=0.3),
    losses.dapo(),
    losses.ppo(reduction="sequence_mean"),
    losses.ppo(reduction="sequence_sum"),
    losses.dapo(reduction="sum"),
    losses.dr_grpo(clip_low=0.1, clip_high=0.3),
]
WITH_ENTROPY = [
    losses.importance_sampling(entropy_coef=0.2),
    losses.ppo(entropy_coef=0.2, reduction="sequence_mean"),
    losses.grpo(entropy_coef=0.2, kl_coef=0.3),
    losses.dapo(entropy_coef=0.2),
    losses.dr_grpo(entropy_coef=0.2),
    losses.gspo(entropy_coef=0.2),
    losses.cispo(entropy_coef=0.2),
    losses.reinforce(entropy_coef=0.2),
    losses.decoupled_ppo(entropy_coef=0.2),
]
BY_GRADIENT = [
    losses.gspo(clip_low=0.1, clip_high=0.2, kl_coef=0.3),
    losses.gspo(reduction="token_mean"),
    losses.cispo(clip_low=0.4, kl_coef=0.3),
    losses.cispo(),
    losses.dro(beta=0.7),
    losses.dro(reduction="sum"),
    losses.reinforce(),
    losses.reinforce(kl_coef=0.3, reduction="sequence_mean"),
]
"""Losses with ratios of rows, or with gradients that are not those of their ratios."""

BY_ROW = ("sequence_mean", "sequence_sum")


def some_inputs(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def rand(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand((ROWS, TOKENS), generator=generator)

    inputs = {name: rand(-2.0, -0.1) for name in NAMES}
    inputs["mask"] = (rand(0, 1) > 0.4).float()
    inputs["advantages"] = rand(-1.5, 1.5)
    inputs["weights"] = rand(-1.0, 1.0)
    return rand(-2.0, -0.1), inputs


def term(spec: LossSpec, new: float, old: float, advantage: float, ref: float) -> float:
    """The loss of one token, as the papers write it."""
    if spec.name == "cross_entropy":
        return -new
    ratio = math.exp(new - old)
    value = -ratio * advantage
    if spec.name != "importance_sampling":
        clipped = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
        value = -min(ratio * advantage, clipped * advantage)
    return value + spec.kl_coef * (math.exp(ref - new) - 1 - (ref - new))


def by_hand(
    spec: LossSpec, logprobs: torch.Tensor, inputs: dict[str, torch.Tensor], denominator: float
) -> float:
    total = 0.0
    for row in range(ROWS):
        used = [t for t in range(1, TOKENS) if inputs["mask"][row, t] > 0]
        per_row = len(used) if (spec.reduction or _default(spec)) in BY_ROW else 1
        for t in used:
            values = [float(inputs[n][row, t]) for n in ("logprobs", "advantages", "ref_logprobs")]
            total += term(spec, float(logprobs[row, t]), *values) / per_row
    return total / denominator


def _default(spec: LossSpec) -> str | None:
    return "sequence_mean" if spec.name == "grpo" and spec.reduction is None else None


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.name}-{s.kl_coef}-{s.reduction}")
@given(seed=st.integers(0, 10_000), denominator=st.floats(0.5, 20))
@settings(max_examples=examples(40), deadline=None)
def test_a_loss_is_its_formula(spec: LossSpec, seed: int, denominator: float) -> None:
    logprobs, inputs = some_inputs(seed)
    found = compute_loss(spec, logprobs, inputs, denominator)
    assert float(found.loss) == pytest.approx(
        by_hand(spec, logprobs, inputs, denominator), rel=1e-4, abs=1e-5
    )
    assert float(found.sums["tokens"]) == float(inputs["mask"][:, 1:].sum())


@pytest.mark.parametrize(
    "spec", [*SPECS, *BY_GRADIENT], ids=lambda s: f"{s.name}-{s.kl_coef}-{s.reduction}"
)
def test_custom_weights_reproduce_the_gradient_of_any_other_loss(spec: LossSpec) -> None:
    logprobs, inputs = some_inputs(7)
    leaf = logprobs.clone().requires_grad_(True)
    compute_loss(spec, leaf, inputs, 4.0).loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    own = logprobs.clone().requires_grad_(True)
    inputs["weights"] = -leaf.grad
    compute_loss(losses.custom(), own, inputs, 1.0).loss.backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    assert torch.allclose(own.grad, leaf.grad, atol=1e-7)


DECOUPLED = [
    losses.decoupled_ppo(),
    losses.decoupled_ppo(weight_cap=1.2),
    losses.decoupled_ppo(token_range=(0.7, 1.4)),
    losses.decoupled_ppo(sequence_range=(0.8, 1.2), reduction="sequence_mean"),
    losses.decoupled_ppo(
        clip_low=0.1, weight_cap=1.3, token_range=(0.5, 2.0), sequence_range=(0.6, 1.5), kl_coef=0.2
    ),
]


def decoupled_by_hand(
    spec: LossSpec, logprobs: torch.Tensor, inputs: dict[str, torch.Tensor], denominator: float
) -> torch.Tensor:
    """Decoupled PPO token by token in float64; the caller differentiates it."""
    total = torch.zeros((), dtype=torch.float64)
    given = {name: values.double() for name, values in inputs.items()}
    for row in range(ROWS):
        used = [t for t in range(1, TOKENS) if inputs["mask"][row, t] > 0]
        gaps = [float(given["prox_logprobs"][row, t] - given["logprobs"][row, t]) for t in used]
        product = math.exp(sum(gaps))
        in_range = True
        if spec.sequence_range is not None and used:
            low, high = spec.sequence_range
            in_range = low ** len(used) <= product <= high ** len(used)
        for t, gap in zip(used, gaps, strict=True):
            weight = math.exp(gap)
            if spec.token_range is not None:
                weight *= spec.token_range[0] <= weight <= spec.token_range[1]
            weight = min(weight, spec.weight_cap or math.inf) * in_range
            new, advantage = logprobs[row, t].double(), given["advantages"][row, t]
            ratio = torch.exp(new - given["prox_logprobs"][row, t])
            clipped = torch.clip(ratio, 1 - spec.clip_low, 1 + spec.clip_high)
            kl = spec.kl_coef * (
                torch.exp(given["ref_logprobs"][row, t] - new)
                - 1
                - (given["ref_logprobs"][row, t] - new)
            )
            per_row = len(used) if spec.reduction == "sequence_mean" else 1
            worse = torch.minimum(ratio * advantage, clipped * advantage)
            total = total + (kl - weight * worse) / per_row
    return total / denominator


@pytest.mark.parametrize("spec", DECOUPLED)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=examples(60), deadline=None)
def test_decoupled_ppo_and_its_corrections_have_the_value_and_gradient_of_their_formulas(
    spec: LossSpec, seed: int
) -> None:
    logprobs, inputs = some_inputs(seed)
    leaf, own = (logprobs.clone().requires_grad_(True) for _ in range(2))
    found = compute_loss(spec, leaf, inputs, 3.0).loss
    wanted = decoupled_by_hand(spec, own, inputs, 3.0)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4, abs=1e-5)
    if inputs["mask"][:, 1:].any():
        found.backward()  # type: ignore[no-untyped-call]
        wanted.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        assert own.grad is not None
        assert torch.allclose(leaf.grad, own.grad, rtol=1e-4, atol=1e-6)


def test_on_policy_samples_give_decoupled_ppo_the_gradient_of_ppo() -> None:
    logprobs, inputs = some_inputs(11)
    inputs["prox_logprobs"] = inputs["logprobs"]
    loss = losses.decoupled_ppo(weight_cap=2, token_range=(0.5, 2), sequence_range=(0.5, 2))
    gradients = []
    for spec in (loss, losses.ppo()):
        leaf = logprobs.clone().requires_grad_(True)
        compute_loss(spec, leaf, inputs, 4.0).loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


def test_a_token_whose_importance_weight_is_infinite_is_dropped_or_capped() -> None:
    logprobs, inputs = some_inputs(5)
    inputs["mask"][:] = 1
    inputs["logprobs"][:, 2] = -1e6
    for spec in (losses.decoupled_ppo(token_range=(0, 5)), losses.decoupled_ppo(weight_cap=2)):
        leaf = logprobs.clone().requires_grad_(True)
        found = compute_loss(spec, leaf, inputs, 1.0)
        found.loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()
        dropped = float(found.sums["dropped_fraction"])
        assert dropped == (ROWS if spec.token_range else 0)


def test_a_worker_computes_every_loss_of_the_wire_format_and_refuses_others() -> None:
    assert set(TERMS) == set(get_args(LossName)) == set(LOSS_INPUTS) == set(DEFAULT_REDUCTION)
    logprobs, inputs = some_inputs(3)
    unknown = LossSpec(name="dpo", reduction="token_mean")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="loss 'dpo'"):
        compute_loss(unknown, logprobs, inputs, 1.0)


def test_what_is_masked_cannot_make_a_loss_infinite() -> None:
    logprobs, inputs = some_inputs(3)
    inputs["mask"][:, 2] = 0
    inputs["logprobs"][:, 2] = -1e6
    inputs["ref_logprobs"][:, 2] = 1e6
    leaf = logprobs.clone().requires_grad_(True)
    found = compute_loss(losses.grpo(kl_coef=0.1), leaf, inputs, 1.0)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(float(found.loss.detach()))
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()


def written_out(
    spec: LossSpec, logprobs: torch.Tensor, inputs: dict[str, torch.Tensor], denominator: float
) -> torch.Tensor:
    """The losses without a bound on the gradient, in plain torch, row by row."""
    total = torch.zeros(())
    for row in range(ROWS):
        used = (inputs["mask"][row] > 0) & (torch.arange(TOKENS) > 0)
        new, advantages = logprobs[row][used], inputs["advantages"][row][used]
        change = new - inputs["logprobs"][row][used]
        low, high = 1 - spec.clip_low, 1 + spec.clip_high
        if spec.name == "gspo":
            if not len(new):
                continue
            ratio = change.mean().exp()
            terms = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        elif spec.name == "cispo":
            terms = -change.exp().clamp(low, high).detach() * advantages * new
        elif spec.name == "dro":
            terms = 0.5 * spec.beta * change**2 - advantages * new
        else:
            terms = -advantages * new
        gap = inputs["ref_logprobs"][row][used] - new
        terms = terms + spec.kl_coef * (gap.exp() - 1 - gap)
        by_row = (spec.reduction or DEFAULT_REDUCTION[spec.name]) in BY_ROW
        total = total + terms.sum() / (max(1, len(new)) if by_row else 1)
    return total / denominator


@pytest.mark.parametrize("spec", BY_GRADIENT, ids=lambda s: f"{s.name}-{s.kl_coef}-{s.reduction}")
@given(seed=st.integers(0, 10_000))
@settings(max_examples=examples(20), deadline=None)
def test_values_and_gradients_are_those_of_plain_torch(spec: LossSpec, seed: int) -> None:
    logprobs, inputs = some_inputs(seed)
    inputs["logprobs"] = logprobs + 0.3 * inputs["weights"]
    own, other = (logprobs.clone().requires_grad_(True) for _ in range(2))
    found = compute_loss(spec, own, inputs, 3.0)
    wanted = written_out(spec, other, inputs, 3.0)
    assert torch.allclose(found.loss, wanted, atol=1e-6)
    found.loss.backward()  # type: ignore[no-untyped-call]
    wanted.backward()  # type: ignore[no-untyped-call]
    mask = inputs["mask"].bool() & (torch.arange(TOKENS) > 0)
    grad = torch.zeros_like(logprobs) if other.grad is None else other.grad
    assert own.grad is not None
    assert torch.allclose(own.grad * mask, grad * mask, atol=1e-6)


def test_gspo_refuses_rows_that_ranks_share() -> None:
    logprobs, inputs = some_inputs(1)
    inputs["row_mask"] = torch.ones(ROWS)
    with pytest.raises(InvalidRequestError, match=r"parallelism\.cp to 1"):
        compute_loss(losses.gspo(), logprobs, inputs, 1.0)


@given(seed=st.integers(0, 10_000), beta=st.floats(0.01, 2))
@settings(max_examples=examples(30), deadline=None)
def test_weights_for_dpo_have_its_gradient(seed: int, beta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, ref = -3 * torch.rand((2, 4, TOKENS), generator=generator)
    mask = (torch.rand((4, TOKENS), generator=generator) > 0.4).float()
    mask[:, 0] = 0
    leaf = new.clone().requires_grad_(True)
    gains = (mask * (leaf - ref)).sum(1)
    wanted = -torch.nn.functional.logsigmoid(beta * (gains[0::2] - gains[1::2])).mean()
    wanted.backward()  # type: ignore[no-untyped-call]
    weights = losses.dpo_weights(new.tolist(), ref.tolist(), mask.tolist(), beta=beta)
    own = new.clone().requires_grad_(True)
    inputs = {"weights": torch.tensor(weights)}
    compute_loss(losses.custom(), own, inputs, 1.0).loss.backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    assert leaf.grad is not None
    assert torch.allclose(own.grad, leaf.grad, atol=1e-6)


def test_rows_that_are_no_pairs_are_refused() -> None:
    for rows in ([], [[0.0]], [[0.0], [0.0, 1.0]]):
        with pytest.raises(InvalidRequestError, match="give pairs of rows"):
            losses.dpo_weights(rows, [[0.0]] * len(rows), [[1.0]] * len(rows))


@pytest.mark.parametrize("spec", WITH_ENTROPY, ids=lambda s: f"{s.name}-{s.reduction}")
def test_the_entropy_is_subtracted_from_each_term(spec: LossSpec) -> None:
    logprobs, inputs = some_inputs(3)
    entropy = torch.rand((ROWS, TOKENS)).requires_grad_(True)
    found = compute_loss(spec, logprobs, inputs, 3.0, entropy_BL=entropy)
    plain = compute_loss(replace(spec, entropy_coef=0.0), logprobs, inputs, 3.0)
    # A loss that is a constant for each token has the reduction's weights as its gradient.
    weights = torch.autograd.grad(found.loss, entropy)[0] / -spec.entropy_coef
    leaf = logprobs.clone().requires_grad_(True)
    by_tokens = losses.cross_entropy(reduction=spec.reduction or DEFAULT_REDUCTION[spec.name])
    compute_loss(by_tokens, leaf, inputs, 3.0).loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert torch.allclose(weights, -leaf.grad, atol=1e-7)
    total = spec.entropy_coef * float((weights * entropy).sum().detach())
    assert float(found.loss.detach()) == pytest.approx(float(plain.loss) - total, abs=1e-6)
    mask = inputs["mask"].clone()
    mask[:, 0] = 0
    assert float(found.sums["entropy"]) == pytest.approx(
        float((mask * entropy).sum().detach()), rel=1e-6
    )


def test_a_loss_without_a_policy_has_no_entropy_term() -> None:
    for name in ("cross_entropy", "custom"):
        with pytest.raises(InvalidRequestError, match="no loss of a policy"):
            check_loss(LossSpec(name=name, entropy_coef=0.1))
