"""Logprobs of a batch's own tokens from a model's logits.

Shapes: B rows, L tokens of the longest row, P of them that are predicted (L - 1), V words of the
vocabulary, W of them that a tensor rank has.
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
    return _placed(chosen_BP1.squeeze(-1) - predicted_BPV.logsumexp(-1), batch)


def token_logprobs_of_parts(
    logits_BLW: torch.Tensor, batch: MicroBatch, first_word: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """As `token_logprobs`, on every rank of a group that has the vocabulary in parts, this rank's
    from `first_word` on; no rank ever has the logits of all words."""
    logprobs_BP = _LogprobsOfParts.apply(  # type: ignore[no-untyped-call]
        logits_BLW[:, :-1].float(), batch.tokens_BL[:, 1:], first_word, group
    )
    assert isinstance(logprobs_BP, torch.Tensor)
    return _placed(logprobs_BP, batch)


class _LogprobsOfParts(torch.autograd.Function):
    """Logprob of the chosen words: logit minus logsumexp, both put together over the group."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BPW: torch.Tensor,
        tokens_BP: torch.Tensor,
        first_word: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        largest_BP = logits_BPW.amax(-1)
        dist.all_reduce(largest_BP, dist.ReduceOp.MAX, group=group)
        weights_BPW = (logits_BPW - largest_BP[..., None]).exp()
        places_BP = tokens_BP - first_word
        is_mine_BP = (places_BP >= 0) & (places_BP < logits_BPW.shape[-1])
        places_BP1 = torch.where(is_mine_BP, places_BP, 0)[..., None]
        chosen_BP = torch.where(is_mine_BP, logits_BPW.gather(-1, places_BP1)[..., 0], 0.0)
        both_2BP = torch.stack([weights_BPW.sum(-1), chosen_BP])
        dist.all_reduce(both_2BP, group=group)
        probabilities_BPW = weights_BPW.div_(both_2BP[0][..., None])
        ctx.save_for_backward(probabilities_BPW, places_BP1, is_mine_BP)
        return both_2BP[1] - largest_BP - both_2BP[0].log()

    @staticmethod
    def backward(ctx: Any, gradient_BP: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities_BPW, places_BP1, is_mine_BP = ctx.saved_tensors
        found_BPW = probabilities_BPW * -gradient_BP[..., None]
        found_BPW.scatter_add_(-1, places_BP1, (gradient_BP * is_mine_BP)[..., None])
        return found_BPW, None, None, None


def _placed(logprobs_BP: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return nn.functional.pad(logprobs_BP * batch.valid_BL[:, 1:], (1, 0))
