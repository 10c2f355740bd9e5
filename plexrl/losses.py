"""The losses of `forward_backward`, by name.

Each is a sum over the tokens of a batch, divided as its `reduction` says:

- `token_mean`: Σ mask · term / Σ mask, over all tokens of the batch. Long rows weigh more.
- `sequence_mean`: the mean over rows of each row's own token mean. All rows weigh the same.
- `sum`: Σ mask · term. Gradients of several batches add up as those of one large batch would.

A reduction is over one batch: gradients of several `forward_backward` calls before a step are added
up, not averaged. `ratio` is exp(logprob - the batch's `logprobs`) and A the batch's `advantages`,
token by token; the controller centres and scales advantages. What per-token values a loss needs is
in its docstring; `plexrl.Batch` says what they are. A batch that lacks one is refused with
`BatchShapeError`.
"""

from plexrl.wire.operations import LossSpec, Reduction


def cross_entropy(*, reduction: Reduction | None = None) -> LossSpec:
    """Negative log-likelihood of the tokens that `mask` weighs: supervised training.

    Needs `mask`. `reduction` is `token_mean` where it is absent.
    """
    return LossSpec(name="cross_entropy", reduction=reduction)


def importance_sampling(*, reduction: Reduction | None = None) -> LossSpec:
    """Policy gradient with the ratio to the sampling policy, unclipped: -ratio · A.

    Needs `mask`, `logprobs` and `advantages`. `reduction` is `token_mean` where it is absent.
    """
    return LossSpec(name="importance_sampling", reduction=reduction)


def ppo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, reduction: Reduction | None = None
) -> LossSpec:
    """PPO's clipped objective (Schulman et al. 2017): -min(ratio · A, clipped ratio · A).

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. Needs `mask`, `logprobs` and
    `advantages`. `reduction` is `token_mean` where it is absent.
    """
    return LossSpec(name="ppo", clip_low=clip_low, clip_high=clip_high, reduction=reduction)


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """PPO's objective, each sample's mean over its tokens, with an optional KL term (GRPO, Shao et
    al. 2024). The advantage of a sample within its group is the controller's to compute.

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. `kl_coef` is the weight of the k3
    estimate of KL(policy ‖ reference). Needs `mask`, `logprobs` and `advantages`, and
    `ref_logprobs` where `kl_coef` is above 0. `reduction` is `sequence_mean` where it is absent.
    """
    return LossSpec(
        name="grpo",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        reduction=reduction,
    )


def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28) -> LossSpec:
    """The clipped objective with a higher upper bound, mean over all tokens of the batch (DAPO, Yu
    et al. 2025). Dynamic sampling is the controller's: `Batch.from_samples(keep=…)`.

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. Needs `mask`, `logprobs` and
    `advantages`.
    """
    return LossSpec(name="dapo", clip_low=clip_low, clip_high=clip_high)


def custom() -> LossSpec:
    """A loss of the controller's own: -Σ weights · logprob, without any division.

    Needs `weights`: minus the gradient of that loss by each token's logprob, computed from what
    `forward` answered. The gradient by the parameters is then that of the loss.
    """
    return LossSpec(name="custom")
