"""Logprobs of a batch's own tokens, from a model's logits.

Shapes: B rows, L tokens of the longest row, P = L - 1 predicted tokens, V vocabulary, W size of a
tensor rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plexrl.worker.batches.packing import MicroBatch


def token_logprobs(logits_BLV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Logprob of every token given those before it, float32 `[B, L]`; column 0 is 0."""
    predicted_BPV = logits_BLV[:, :-1].float()
    chosen_BP1 = predicted_BPV.gather(-1, batch.tokens_BL[:, 1:, None])
    return _padded(chosen_BP1.squeeze(-1) - predicted_BPV.logsumexp(-1), batch)


def sharded_token_logprobs(
    logits_BLW: torch.Tensor, batch: MicroBatch, first_token: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """As `token_logprobs`, on every rank of a group that shards the vocabulary.

    This rank's part begins at token id `first_token`. No rank ever has the logits of the whole
    vocabulary.
    """
    logprobs_BP = _ShardedLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_BLW[:, :-1].float(), batch.tokens_BL[:, 1:], first_token, group
    )
    assert isinstance(logprobs_BP, torch.Tensor)
    return _padded(logprobs_BP, batch)


class _ShardedLogprobs(torch.autograd.Function):
    """Logprob of the chosen tokens: logit minus logsumexp, both all-reduced over the group."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BPW: torch.Tensor,
        tokens_BP: torch.Tensor,
        first_token: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        largest_BP = logits_BPW.amax(-1)
        dist.all_reduce(largest_BP, dist.ReduceOp.MAX, group=group)
        weights_BPW = (logits_BPW - largest_BP[..., None]).exp()
        local_BP = tokens_BP - first_token
        is_own_BP = (local_BP >= 0) & (local_BP < logits_BPW.shape[-1])
        local_BP1 = torch.where(is_own_BP, local_BP, 0)[..., None]
        chosen_BP = torch.where(is_own_BP, logits_BPW.gather(-1, local_BP1)[..., 0], 0.0)
        both_2BP = torch.stack([weights_BPW.sum(-1), chosen_BP])
        dist.all_reduce(both_2BP, group=group)
        probabilities_BPW = weights_BPW.div_(both_2BP[0][..., None])
        ctx.save_for_backward(probabilities_BPW, local_BP1, is_own_BP)
        return both_2BP[1] - largest_BP - both_2BP[0].log()

    @staticmethod
    def backward(ctx: Any, gradient_BP: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities_BPW, local_BP1, is_own_BP = ctx.saved_tensors
        found_BPW = probabilities_BPW * -gradient_BP[..., None]
        found_BPW.scatter_add_(-1, local_BP1, (gradient_BP * is_own_BP)[..., None])
        return found_BPW, None, None, None


def _padded(logprobs_BP: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return nn.functional.pad(logprobs_BP * batch.valid_BL[:, 1:], (1, 0))
