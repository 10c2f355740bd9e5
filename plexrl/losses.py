"""The losses of `forward_backward`, by name."""

from plexrl.wire.operations import LossSpec, Reduction


def cross_entropy(*, reduction: Reduction | None = None) -> LossSpec:
    """Negative log-likelihood of the tokens that `mask` weighs."""
    return LossSpec(name="cross_entropy", reduction=reduction)


def importance_sampling(*, reduction: Reduction | None = None) -> LossSpec:
    """Policy gradient with the ratio to the sampling policy, unclipped."""
    return LossSpec(name="importance_sampling", reduction=reduction)


def ppo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, reduction: Reduction | None = None
) -> LossSpec:
    """PPO's clipped objective, mean over tokens."""
    return LossSpec(name="ppo", clip_low=clip_low, clip_high=clip_high, reduction=reduction)


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """The clipped objective, each sample's mean over its tokens; KL to `ref_logprobs` optional."""
    return LossSpec(
        name="grpo",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        reduction=reduction,
    )


def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28) -> LossSpec:
    """The clipped objective with a higher upper bound, mean over all tokens of the batch."""
    return LossSpec(name="dapo", clip_low=clip_low, clip_high=clip_high)


def custom() -> LossSpec:
    """A loss of the controller's own: its `weights` are minus the gradient by each logprob."""
    return LossSpec(name="custom")
