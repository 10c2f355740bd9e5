"""Logprobs of a batch's own tokens from a model's logits.

Shapes: B rows, L tokens of the longest row, V words of the vocabulary.
"""

import torch
from torch import nn

from plexrl.worker.packing import MicroBatch


def token_logprobs(logits_BLV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Logprob of every token given those before it, float32 `[B, L]`; column 0 is 0."""
    predicted_BLV = logits_BLV[:, :-1].float()
    chosen_BL1 = predicted_BLV.gather(-1, batch.tokens_BL[:, 1:, None])
    logprobs_BL = chosen_BL1.squeeze(-1) - predicted_BLV.logsumexp(-1)
    return nn.functional.pad(logprobs_BL * batch.valid_BL[:, 1:], (1, 0))
