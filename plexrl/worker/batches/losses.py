"""The losses of a training batch, as functions of per-token logprobs, or of values.

Shapes: B rows, L tokens of the longest row. Entry t is for token t given the tokens before it, so
column 0 never counts. Every loss is Σ weight·term / denominator. The denominator is that of the
whole batch over all ranks, so the sum over ranks and micro-batches is the batch's loss.

    cross_entropy         term = -logprob
    importance_sampling   term = -ratio·A                        ratio = exp(logprob - old)
    ppo                   term = -min(ratio·A, clip(ratio)·A)    (Schulman et al. 2017)
    grpo                  ppo, + kl_coef·k3(ref), mean of rows   (Shao et al. 2024)
    dapo                  ppo with its own upper clip, mean of tokens (Yu et al. 2025)
    gspo                  ppo with the ratio of the row: exp of its mean log ratio, of whose
                          gradient every token has its share (Zheng et al. 2025)
    cispo                 term = -clip(ratio)·A·logprob, the ratio a constant (MiniMax 2025)
    dro                   term = -A·logprob + beta/2·(logprob - old)²  (Richemond et al. 2024)
    reinforce             term = -A·logprob                      (Williams 1992)
    decoupled_ppo         ppo with ratio = exp(logprob - prox), times the constant w of `_weights`
                          (Hilton et al. 2021; Fu et al. 2025)
    custom                term = -logprob, weighted by the controller's own weights; of a critic
                          -value
    value                 term = max((value - return)², (clipped value - return)²) / 2
                          (Schulman et al. 2017, of the authors' implementation)

With `entropy_coef` each term of a policy's loss is less entropy_coef · H, the entropy of the
token's distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from plexrl.errors import InvalidRequestError
from plexrl.wire.operations import DEFAULT_REDUCTION, LossSpec

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """Loss of a micro-batch, and statistics to report."""

    loss: torch.Tensor
    """Scalar, already divided by the batch's denominator."""
    sums: Tensors
    """Sums over tokens, weighted by the mask, as scalars; `tokens` is the sum of the mask."""


def compute_loss(
    spec: LossSpec,
    logprobs_BL: torch.Tensor,
    inputs: Tensors,
    denominator: float,
    *,
    entropy_BL: torch.Tensor | None = None,
    output: str = "logprob",
) -> LossResult:
    """The loss of `spec` on one micro-batch.

    `entropy_BL` is that of each token's distribution: a statistic, and with `entropy_coef` a term,
    for which it must have a graph.

    With the `output` `value` the numbers `[B, L]` are the values of a critic, not logprobs.

    `inputs` holds float32 `[B, L]` tensors by the names of `loss_inputs`. If several ranks share
    rows, it also holds sums `[B]` over each whole row, over those ranks: `row_mask` of the mask,
    and `row_log_weight` of mask · (prox_logprobs - logprobs) if there are `prox_logprobs`.

    Raises:
        InvalidRequestError: there is no such loss, or gspo's rows are shared by ranks.
    """
    terms = TERMS.get(spec.name)
    if terms is None:
        raise InvalidRequestError(
            f"a worker cannot compute the loss {spec.name!r}: use one of {', '.join(TERMS)}"
        )
    is_custom = spec.name == "custom"
    weights_BL = _without_first(inputs["weights" if is_custom else "mask"])
    mask_BL = (weights_BL != 0).to(torch.float32) if is_custom else weights_BL
    sums = {"tokens": mask_BL.sum(), output: (mask_BL * logprobs_BL).sum().detach()}
    terms_BL = terms(spec, logprobs_BL, inputs, mask_BL, sums)
    if entropy_BL is not None:
        sums["entropy"] = (mask_BL * entropy_BL).sum().detach()
        if spec.entropy_coef > 0:
            terms_BL = terms_BL - spec.entropy_coef * entropy_BL
    reduction = spec.reduction or DEFAULT_REDUCTION[spec.name]
    if reduction in ("sequence_mean", "sequence_sum") and not is_custom:
        row_mask_B = inputs.get("row_mask", mask_BL.sum(dim=1))
        weights_BL = mask_BL / row_mask_B[:, None].clamp(min=1e-9)
    return LossResult(loss=(weights_BL * terms_BL).sum() / denominator, sums=sums)


def _likelihood_terms(
    _: LossSpec, logprobs_BL: torch.Tensor, _inputs: Tensors, _mask_BL: torch.Tensor, _sums: Tensors
) -> torch.Tensor:
    return -logprobs_BL


def _gradient_terms(
    spec: LossSpec,
    logprobs_BL: torch.Tensor,
    inputs: Tensors,
    mask_BL: torch.Tensor,
    sums: Tensors,
) -> torch.Tensor:
    """Terms whose gradient by a logprob is a constant."""
    weights_BL = inputs["advantages"]
    if spec.name == "cispo":
        change_BL = torch.where(mask_BL > 0, logprobs_BL.detach() - inputs["logprobs"], 0.0)
        ratio_BL = torch.exp(change_BL)
        clipped_BL = ratio_BL.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
        sums["clip_fraction"] = (mask_BL * (clipped_BL != ratio_BL)).sum()
        _note_ratio(ratio_BL, change_BL, mask_BL, sums)
        weights_BL = clipped_BL * weights_BL
    return _with_reference(spec, -weights_BL * logprobs_BL, logprobs_BL, inputs, mask_BL, sums)


def _penalised_terms(
    spec: LossSpec,
    logprobs_BL: torch.Tensor,
    inputs: Tensors,
    mask_BL: torch.Tensor,
    sums: Tensors,
) -> torch.Tensor:
    change_BL = torch.where(mask_BL > 0, logprobs_BL - inputs["logprobs"], 0.0)
    detached_BL = change_BL.detach()
    _note_ratio(torch.exp(detached_BL), detached_BL, mask_BL, sums)
    return spec.beta / 2 * change_BL.square() - inputs["advantages"] * logprobs_BL


def _policy_terms(
    spec: LossSpec,
    logprobs_BL: torch.Tensor,
    inputs: Tensors,
    mask_BL: torch.Tensor,
    sums: Tensors,
) -> torch.Tensor:
    # Masked tokens may have any value; its exp must not enter the sum as 0 times infinity.
    old_BL = inputs["prox_logprobs" if spec.name == "decoupled_ppo" else "logprobs"]
    change_BL = torch.where(mask_BL > 0, logprobs_BL - old_BL, 0.0)
    if spec.name == "gspo":
        change_BL = _of_rows(change_BL, inputs, mask_BL)
    ratio_BL = torch.exp(change_BL)
    advantages_BL = inputs["advantages"]
    terms_BL = -ratio_BL * advantages_BL
    if spec.name != "importance_sampling":
        clipped_BL = ratio_BL.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
        bounded_BL = -clipped_BL * advantages_BL
        sums["clip_fraction"] = (mask_BL * (bounded_BL > terms_BL)).sum().detach()
        terms_BL = torch.maximum(terms_BL, bounded_BL)
    if spec.name == "decoupled_ppo":
        terms_BL = _weights(spec, inputs, mask_BL, sums) * terms_BL
    _note_ratio(ratio_BL, change_BL, mask_BL, sums)
    return _with_reference(spec, terms_BL, logprobs_BL, inputs, mask_BL, sums)


def _note_ratio(
    ratio_BL: torch.Tensor, change_BL: torch.Tensor, mask_BL: torch.Tensor, sums: Tensors
) -> None:
    sums["ratio"] = (mask_BL * ratio_BL).sum().detach()
    sums["old_kl"] = (mask_BL * (ratio_BL - 1.0 - change_BL)).sum().detach()


def _of_rows(change_BL: torch.Tensor, inputs: Tensors, mask_BL: torch.Tensor) -> torch.Tensor:
    """The mean log ratio of each token's row."""
    if "row_mask" in inputs:
        raise InvalidRequestError(
            "gspo needs whole rows, and context parallelism divides them over ranks: set "
            "parallelism.cp to 1, or use another loss"
        )
    total_B = (mask_BL * change_BL).sum(dim=1) / mask_BL.sum(dim=1).clamp(min=1e-9)
    return total_B[:, None].expand_as(change_BL)


def _value_terms(
    spec: LossSpec,
    values_BL: torch.Tensor,
    inputs: Tensors,
    mask_BL: torch.Tensor,
    sums: Tensors,
) -> torch.Tensor:
    """Half the squared error. A value that has left the batch's by more than the clip counts as if
    it had not, where that is the larger error: it is pulled no further away."""
    errors_BL = (values_BL - inputs["returns"]).square()
    sums["return"] = (mask_BL * inputs["returns"]).sum()
    sums["squared_error"] = (mask_BL * errors_BL).sum().detach()
    if spec.value_clip is not None:
        old_BL, clip = inputs["values"], spec.value_clip
        bounded_BL = old_BL + (values_BL - old_BL).clamp(-clip, clip)
        clipped_BL = (bounded_BL - inputs["returns"]).square()
        sums["clip_fraction"] = (mask_BL * (clipped_BL > errors_BL)).sum()
        errors_BL = torch.maximum(errors_BL, clipped_BL)
    return 0.5 * errors_BL


def _with_reference(
    spec: LossSpec,
    terms_BL: torch.Tensor,
    logprobs_BL: torch.Tensor,
    inputs: Tensors,
    mask_BL: torch.Tensor,
    sums: Tensors,
) -> torch.Tensor:
    """The terms, with that of the KL divergence from the reference."""
    if spec.kl_coef > 0:
        gap_BL = torch.where(mask_BL > 0, inputs["ref_logprobs"] - logprobs_BL, 0.0)
        k3_BL = torch.exp(gap_BL) - 1.0 - gap_BL
        sums["ref_kl"] = (mask_BL * k3_BL).sum().detach()
        terms_BL = terms_BL + spec.kl_coef * k3_BL
    return terms_BL


def _weights(spec: LossSpec, inputs: Tensors, mask_BL: torch.Tensor, sums: Tensors) -> torch.Tensor:
    """The importance weights of tokens `[B, L]`: exp(prox - logprobs), 0 outside the ranges, and at
    most the cap."""
    log_BL = torch.where(mask_BL > 0, inputs["prox_logprobs"] - inputs["logprobs"], 0.0)
    kept_BL = torch.ones_like(mask_BL, dtype=torch.bool)
    if spec.token_range is not None:
        kept_BL &= _is_inside(log_BL, spec.token_range)
    if spec.sequence_range is not None:
        row_log_B = inputs.get("row_log_weight", (mask_BL * log_BL).sum(dim=1))
        row_mask_B = inputs.get("row_mask", mask_BL.sum(dim=1))
        mean_B = row_log_B / row_mask_B.clamp(min=1e-9)
        kept_BL &= _is_inside(mean_B, spec.sequence_range)[:, None]
    # exp of a dropped token may be infinite, and infinity times 0 is not 0.
    weights_BL = torch.where(kept_BL, torch.exp(torch.where(kept_BL, log_BL, 0.0)), 0.0)
    if spec.weight_cap is not None:
        sums["capped_fraction"] = (mask_BL * (weights_BL > spec.weight_cap)).sum()
        weights_BL = weights_BL.clamp(max=spec.weight_cap)
    sums["weight"] = (mask_BL * weights_BL).sum()
    sums["dropped_fraction"] = (mask_BL * ~kept_BL).sum()
    return weights_BL


def _is_inside(log_weights: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    weights = torch.exp(log_weights)
    return (weights >= bounds[0]) & (weights <= bounds[1])


Terms = Callable[[LossSpec, torch.Tensor, Tensors, torch.Tensor, Tensors], torch.Tensor]
"""Maps a spec, logprobs `[B, L]`, inputs and the mask `[B, L]` to the terms `[B, L]`. It may add to
the sums, its last argument."""

TERMS: dict[str, Terms] = {
    "cross_entropy": _likelihood_terms,
    "reinforce": _gradient_terms,
    "importance_sampling": _policy_terms,
    "ppo": _policy_terms,
    "grpo": _policy_terms,
    "dapo": _policy_terms,
    "gspo": _policy_terms,
    "cispo": _gradient_terms,
    "dro": _penalised_terms,
    "decoupled_ppo": _policy_terms,
    "custom": _likelihood_terms,
    "value": _value_terms,
}
"""All losses."""


def _without_first(values_BL: torch.Tensor) -> torch.Tensor:
    """The values with column 0 set to zero: a row's first token is not predicted."""
    kept_BL = values_BL.clone()
    kept_BL[:, 0] = 0.0
    return kept_BL
