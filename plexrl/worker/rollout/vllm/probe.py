"""Checks that vLLM computes with the current weights, by the logprobs of a few tokens.

Equal tensors do not prove which memory a kernel reads; equal logprobs do. The check detects a
kernel with a packed copy of previous weights, and a model that vLLM implements differently.

Shapes: L tokens, V vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch

from plexrl.errors import StaleWeightsError

if TYPE_CHECKING:
    from torch import nn

TOKENS = 16
TOLERANCES = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (0.02, 0.04)}
"""By the weights' dtype: allowed error of a logprob, as (absolute part, share of the largest). In
bfloat16 two correct orders of summation differ by a few steps of 2^-8 of a logit."""


def probe_tokens(vocabulary: int, sequence_tokens_max: int) -> list[int]:
    """Token ids spread over the vocabulary, one fewer than the longest sequence at most."""
    count = min(TOKENS, sequence_tokens_max - 1)
    return [(3 + 7919 * index) % vocabulary for index in range(count)]


@torch.no_grad()
def model_logprobs(model: "nn.Module", tokens: list[int]) -> torch.Tensor:
    """The model's logprobs of `tokens[1:]`, each given the tokens before it: float32 `[L - 1]`."""
    row = torch.tensor([tokens], device=next(model.parameters()).device)
    logits: Any = model(input_ids=row, use_cache=False).logits
    logprobs_LV = logits[0, :-1].float().log_softmax(dim=-1)
    found_L: torch.Tensor = logprobs_LV.gather(-1, row[0, 1:, None])[:, 0]
    return found_L.cpu()


def check_logprobs(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises `StaleWeightsError` if vLLM's logprobs `found` differ from `wanted`."""
    least, share = TOLERANCES[dtype]
    allowed = least + share * float(wanted.abs().max())
    error = float((found - wanted).abs().max())
    # Every comparison with NaN is false, and NaN must count as different.
    if not error <= allowed:
        raise StaleWeightsError(
            f"vLLM's logprobs differ by up to {error:.3g} from those of the last update's weights; "
            f"{allowed:.3g} is allowed in {dtype}. It generates nothing until an update succeeds: "
            "sync weights again, or use backend 'torch'",
            error=error,
            allowed=allowed,
        )
