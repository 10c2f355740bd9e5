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
With `entropy_coef`, which the losses with advantages have, each token's term is less entropy_coef
times the entropy of its distribution, of temperature 1 over the whole vocabulary.
Each docstring lists the per-token values that the loss needs; `plexrl.Batch` defines them. A batch
without one of them is refused with `BatchShapeError`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers
from plexrl.wire.operations import LossSpec, Reduction

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Rows = Sequence[Sequence[float] | npt.NDArray[np.floating[Any] | np.integer[Any] | np.bool_]]
    """`[rows][tokens]`."""


def cross_entropy(*, reduction: Reduction | None = None) -> LossSpec:
    """Negative log-likelihood of the tokens, weighted by `mask`: supervised training.

    Needs `mask`. `reduction` defaults to `token_mean`.
    """
    return LossSpec(name="cross_entropy", reduction=reduction)


def importance_sampling(
    *, entropy_coef: float = 0.0, reduction: Reduction | None = None
) -> LossSpec:
    """Policy gradient with the ratio to the sampling policy, unclipped: -ratio · A.

    Needs `mask`, `logprobs` and `advantages`. `reduction` defaults to `token_mean`.
    `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(name="importance_sampling", entropy_coef=entropy_coef, reduction=reduction)


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """PPO's clipped objective (Schulman et al. 2017): -min(ratio · A, clipped ratio · A).

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. Needs `mask`, `logprobs` and
    `advantages`. `reduction` defaults to `token_mean`.
    `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(
        name="ppo",
        clip_low=clip_low,
        clip_high=clip_high,
        entropy_coef=entropy_coef,
        reduction=reduction,
    )


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """PPO's objective, averaged over each sample's tokens, with an optional KL term (GRPO, Shao et
    al. 2024). The controller computes the advantage of a sample within its group.

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. `kl_coef` is the weight of the k3
    estimate of KL(policy ‖ reference). Needs `mask`, `logprobs` and `advantages`, and
    `ref_logprobs` if `kl_coef` is above 0. `reduction` defaults to `sequence_mean`.
    `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(
        name="grpo",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        reduction=reduction,
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    entropy_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """The clipped objective with a higher upper bound, averaged over all tokens of the batch (DAPO,
    Yu et al. 2025). The controller does dynamic sampling: `Batch.from_samples(keep=…)`.

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. Needs `mask`, `logprobs` and
    `advantages`. `reduction` defaults to `token_mean`.
    `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(
        name="dapo",
        clip_low=clip_low,
        clip_high=clip_high,
        entropy_coef=entropy_coef,
        reduction=reduction,
    )


def dr_grpo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, entropy_coef: float = 0.0
) -> LossSpec:
    """PPO's objective as a sum, without a division by lengths (Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783). Divide in the step, by a constant: `optim_step(divide_by=rows · max_tokens)`.
    The controller does not divide advantages by the standard deviation of their group.

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]. Needs `mask`, `logprobs` and
    `advantages`. `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(
        name="ppo",
        clip_low=clip_low,
        clip_high=clip_high,
        entropy_coef=entropy_coef,
        reduction="sum",
    )


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """The clipped objective with one ratio for each row, exp of the mean of logprob - `logprobs`
    over the tokens that `mask` counts (GSPO, Zheng et al. 2025, arXiv:2507.18071).

    All tokens of a row have the same advantage. The ratio is clipped to [1 - `clip_low`,
    1 + `clip_high`]; it varies little, so the bounds are narrow. Needs `mask`, `logprobs` and
    `advantages`, and `ref_logprobs` if `kl_coef` is above 0. `reduction` defaults to
    `sequence_mean`. Context parallelism is refused.
    `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(
        name="gspo",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        reduction=reduction,
    )


def cispo(
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """Policy gradient with a clipped ratio as its weight: -clipped ratio · A · logprob. No gradient
    flows through the ratio, and every token has one (CISPO, MiniMax 2025, arXiv:2506.13585).

    The ratio is clipped to [1 - `clip_low`, 1 + `clip_high`]; 1 is no lower bound. Needs `mask`,
    `logprobs` and `advantages`, and `ref_logprobs` if `kl_coef` is above 0. `reduction` defaults to
    `token_mean`. `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(
        name="cispo",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        reduction=reduction,
    )


def dro(
    *, beta: float = 0.05, entropy_coef: float = 0.0, reduction: Reduction | None = None
) -> LossSpec:
    """Policy gradient without a ratio, with a quadratic penalty on the distance to the policy that
    drew the tokens: -(A · logprob - beta / 2 · (logprob - `logprobs`)²) (after DRO, Richemond et
    al. 2024, arXiv:2405.19107).

    Needs `mask`, `logprobs` and `advantages`. `reduction` defaults to `token_mean`.
    `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(name="dro", beta=beta, entropy_coef=entropy_coef, reduction=reduction)


def reinforce(
    *,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    reduction: Reduction | None = None,
) -> LossSpec:
    """Policy gradient without a ratio: -A · logprob (Williams 1992).

    The controller computes advantages: a reward less the mean of the prompt's other samples (RLOO,
    Ahmadian et al. 2024), or less a KL term and scaled over the batch (REINFORCE++, Hu 2025). Needs
    `mask` and `advantages`, and `ref_logprobs` if `kl_coef` is above 0. `reduction` defaults to
    `token_mean`. `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(
        name="reinforce", kl_coef=kl_coef, entropy_coef=entropy_coef, reduction=reduction
    )


def decoupled_ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float | None = None,
    token_range: tuple[float, float] | None = None,
    sequence_range: tuple[float, float] | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
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
    `reduction` defaults to `token_mean`. `entropy_coef` weighs the entropy, which is subtracted.
    """
    return LossSpec(
        name="decoupled_ppo",
        clip_low=clip_low,
        clip_high=clip_high,
        weight_cap=weight_cap,
        token_range=token_range,
        sequence_range=sequence_range,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        reduction=reduction,
    )


def custom() -> LossSpec:
    """A loss that the controller defines: -Σ weights · logprob, without a division. For a critic
    -Σ weights · value.

    Needs `weights`: minus the gradient of the controller's loss with respect to each token's
    logprob (or value), computed from the result of `forward`. The gradient with respect to the
    parameters is then that of the controller's loss.
    """
    return LossSpec(name="custom")


def value(*, clip: float | None = 0.2, reduction: Reduction | None = None) -> LossSpec:
    """The loss of a critic, a train deployment of a model with head `value`:
    max((value - return)², (clipped value - return)²) / 2 (Schulman et al. 2017, as the authors
    implemented it).

    The clipped value is within `clip` of the batch's `values`, those of `forward` before the first
    step with the batch; None: only the first square. Needs `mask` and `returns`, and `values` with
    a `clip`; `gae` computes returns. `reduction` defaults to `token_mean`.
    """
    return LossSpec(name="value", value_clip=clip, reduction=reduction)


def gae(
    rewards: "Rows",
    values: "Rows",
    mask: "Rows",
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_values: Sequence[float] | None = None,
) -> "tuple[list[npt.NDArray[np.float32]], list[npt.NDArray[np.float32]]]":
    """Advantages and returns of tokens, by generalised advantage estimation (Schulman et al. 2016,
    arXiv:1506.02438): advantage_t = δ_t + gamma · lam · advantage_u, and
    δ_t = reward_t + gamma · value_u - value_t. u is the row's next token that `mask` counts.

    `rewards`, `values` and `mask` have a row for each row of the batch, as long as that, prompt
    included. A token with mask 0 (a prompt's, a tool's) is no action: it is passed over, and its
    results are 0. `values` are those of a critic's `forward`. `last_values` `[rows]` are the values
    after the last tokens: absent, 0, for rows that have ended.

    Returns advantages and returns (advantage + value), float32 `[tokens]` for each row:
    `batch.with_values("advantages", …)` and `batch.with_values("returns", …)`. Nothing is centred
    or scaled.

    Raises:
        InvalidRequestError: lengths differ, `gamma` or `lam` is not from 0 to 1, or a token with
            mask 0 has a reward.
    """
    import numpy as np

    check_numbers("advantages", {"gamma": gamma, "lam": lam})
    lengths = [[len(row) for row in rows] for rows in (rewards, values, mask)]
    after = [0.0] * len(lengths[0]) if last_values is None else list(last_values)
    if lengths[0] != lengths[1] or lengths[0] != lengths[2] or len(after) != len(lengths[0]):
        raise InvalidRequestError(
            f"gae got {len(lengths[0])} rows of rewards, {len(lengths[1])} of values, "
            f"{len(lengths[2])} of mask and {len(after)} last values: give one of each for every "
            "row of the batch, with one number for each of its tokens"
        )
    shape = (len(after), max(lengths[0], default=0))
    reward_RL, value_RL, mask_RL = (np.zeros(shape) for _ in range(3))
    for padded, rows in ((reward_RL, rewards), (value_RL, values), (mask_RL, mask)):
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
    acts_RL = mask_RL != 0
    if (lost := np.argwhere((reward_RL != 0) & ~acts_RL)).size:
        row, token = lost[0].tolist()
        raise InvalidRequestError(
            f"rewards: token {token} of row {row} has reward {reward_RL[row, token]:g} and mask 0: "
            "give the reward to a token that the model drew, such as the row's last one"
        )
    advantage_RL = np.zeros(shape)
    value_R, advantage_R = np.array(after, dtype=np.float64), np.zeros(shape[0])
    for t in reversed(range(shape[1])):
        delta_R = reward_RL[:, t] + gamma * value_R - value_RL[:, t]
        advantage_R = np.where(acts_RL[:, t], delta_R + gamma * lam * advantage_R, advantage_R)
        value_R = np.where(acts_RL[:, t], value_RL[:, t], value_R)
        advantage_RL[:, t] = advantage_R
    advantage_RL = np.where(acts_RL, advantage_RL, 0.0)
    return_RL = np.where(acts_RL, advantage_RL + value_RL, 0.0)

    def rows_of(padded: "npt.NDArray[np.float64]") -> "list[npt.NDArray[np.float32]]":
        return [
            row[:length].astype(np.float32) for row, length in zip(padded, lengths[0], strict=True)
        ]

    return rows_of(advantage_RL), rows_of(return_RL)


def dpo_weights(
    logprobs: Sequence[Sequence[float]],
    ref_logprobs: Sequence[Sequence[float]],
    mask: Sequence[Sequence[float]],
    *,
    beta: float = 0.1,
) -> list[list[float]]:
    """`weights` of a batch with which `custom()` has the gradient of direct preference optimisation
    (Rafailov et al. 2023, arXiv:2305.18290): the mean over pairs of -log sigmoid(beta · margin).

    Rows 2k and 2k + 1 are the preferred and the other answer to one prompt, which `mask` leaves
    out. The margin is the difference of both rows' Σ mask · (logprob - ref_logprob). `logprobs` are
    those of the train deployment with its present weights (`forward`), and `ref_logprobs` those of
    the reference.

    Raises:
        InvalidRequestError: the rows are no pairs, lengths differ, or `beta` is out of range.
    """
    check_numbers("preference", {"beta": beta})
    rows = len(logprobs)
    lengths = [[len(row) for row in values] for values in (logprobs, ref_logprobs, mask)]
    if rows % 2 or not rows or lengths[0] != lengths[1] or lengths[0] != lengths[2]:
        raise InvalidRequestError(
            f"dpo_weights got {rows} rows: give pairs of rows, and as many values of each token in "
            "logprobs, ref_logprobs and mask"
        )
    gains = [
        sum([m * (new - ref) for new, ref, m in zip(*row, strict=True)])
        for row in zip(logprobs, ref_logprobs, mask, strict=True)
    ]
    weights: list[list[float]] = []
    for first in range(0, rows, 2):
        margin = beta * (gains[first] - gains[first + 1])
        pull = beta * 0.5 * (1.0 - math.tanh(margin / 2)) / (rows // 2)
        weights.append([pull * m for m in mask[first]])
        weights.append([-pull * m for m in mask[first + 1]])
    return weights
