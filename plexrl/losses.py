"""The losses of `forward_backward`, by name.

Each is a sum over the tokens of a batch, divided according to its `reduction`:

- `token_mean`: Σ mask · term / Σ mask, over all tokens of the batch. Long rows weigh more.
- `sequence_mean`: the mean over rows of each row's own token mean. All rows weigh the same.
- `sum`: Σ mask · term.
- `sequence_sum`: the sum over rows of each row's own token mean.

A reduction is over one batch: the gradients of several `forward_backward` calls before a step are
summed, not averaged. To train on one batch in parts, use a sum, and divide in the step:
`optim_step(divide_by=…)` with Σ mask (`sum`), or the number of rows of which a token counts
(`sequence_sum`), of all parts. That is the step by the mean over the whole batch, whatever the
sizes of the parts. `ratio` is exp(logprob - the batch's `logprobs`), except in `decoupled_ppo`,
and A is the batch's `advantages`, both per token; the controller centres and scales advantages.
Each docstring lists the per-token values that the loss needs; `plexrl.Batch` defines them. A batch
without one of them is refused with `BatchShapeError`.
"""

from plexrl.wire.operations import LossSpec, Reduction


def cross_entropy(*, reduction: Reduction | None = None) -> LossSpec:
    """Negative log-likelihood of the tokens, weighted by `mask`: supervised training.

    Needs `mask`. `reduction` defaults to `token_mean`.
    """
    return LossSpec(name="cross_entropy", reduction=reduction)


def importance_sampling(*, reduction: Reduction | None = None) -> LossSpec:
    """Policy gradient with the ratio to the sampling policy, unclipped: -ratio · A.

    Needs `mask`, `logprobs` and `advantages`. `reduction` defaults to `token_mean`.
    """
    return LossSpec(name="importance_sampling", reduction=reduction)


def ppo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, reduction: Reduction | None = None
) -> LossSpec:
    """PPO's clipped objective (Schulman et al. 2017): -min(ratio · A, clipped ratio · A).

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. Needs `mask`, `logprobs` and
    `advantages`. `reduction` defaults to `token_mean`.
    """
    return LossSpec(name="ppo", clip_low=clip_low, clip_high=clip_high, reduction=reduction)


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """PPO's objective, averaged over each sample's tokens, with an optional KL term (GRPO, Shao et
    al. 2024). The controller computes the advantage of a sample within its group.

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. `kl_coef` is the weight of the k3
    estimate of KL(policy ‖ reference). Needs `mask`, `logprobs` and `advantages`, and
    `ref_logprobs` if `kl_coef` is above 0. `reduction` defaults to `sequence_mean`.
    """
    return LossSpec(
        name="grpo",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        reduction=reduction,
    )


def dapo(
    *, clip_low: float = 0.2, clip_high: float = 0.28, reduction: Reduction | None = None
) -> LossSpec:
    """The clipped objective with a higher upper bound, averaged over all tokens of the batch (DAPO,
    Yu et al. 2025). The controller does dynamic sampling: `Batch.from_samples(keep=…)`.

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. Needs `mask`, `logprobs` and
    `advantages`. `reduction` defaults to `token_mean`.
    """
    return LossSpec(name="dapo", clip_low=clip_low, clip_high=clip_high, reduction=reduction)


def decoupled_ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float | None = None,
    token_range: tuple[float, float] | None = None,
    sequence_range: tuple[float, float] | None = None,
    kl_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """PPO's objective for samples of an older policy: -w · min(ratio · A, clipped ratio · A)
    (Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298).

    The policy that is clipped against, the *proximal* policy, is not the one that drew the tokens.
    `ratio` is exp(logprob - `prox_logprobs`), clipped to [1 - `clip_low`, 1 + `clip_high`]. The
    importance weight w = exp(`prox_logprobs` - `logprobs`) is a constant: no gradient flows
    through it. Three corrections limit w, and may be combined:

    - `weight_cap`: w is at most this. *Truncated importance sampling* (Espeholt et al. 2018,
      arXiv:1802.01561; Yao et al. 2025). 2 is usual.
    - `token_range`: w = 0 for a token with w outside [low, high]. *Token-level mask* (IcePop, Ling
      Team 2025, arXiv:2510.18855). (0.5, 5) is usual.
    - `sequence_range`: w = 0 for all tokens of a row if the geometric mean of w over the tokens
      that `mask` counts, each weighted by it, is outside [low, high]. *Sequence-level mask* (Liu,
      Li et al. 2025). The mean does not depend on the row's length.

    Ranges are compared before the cap. A token with w = 0 still counts in the reduction. The
    metrics `weight`, `capped_fraction` and `dropped_fraction` are means over the tokens.

    Needs `mask`, `logprobs` (of the policies that drew the tokens), `prox_logprobs` and
    `advantages`, and `ref_logprobs` if `kl_coef` is above 0, as in `grpo`. `prox_logprobs` are
    those of the train deployment before the first step with the batch: `forward(batch)`.
    `reduction` defaults to `token_mean`.
    """
    return LossSpec(
        name="decoupled_ppo",
        clip_low=clip_low,
        clip_high=clip_high,
        weight_cap=weight_cap,
        token_range=token_range,
        sequence_range=sequence_range,
        kl_coef=kl_coef,
        reduction=reduction,
    )


def custom() -> LossSpec:
    """A loss that the controller defines: -Σ weights · logprob, without a division.

    Needs `weights`: minus the gradient of the controller's loss with respect to each token's
    logprob, computed from the result of `forward`. The gradient with respect to the parameters is
    then that of the controller's loss.
    """
    return LossSpec(name="custom")
