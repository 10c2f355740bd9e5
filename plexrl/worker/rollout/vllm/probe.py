"""Whether vLLM computes what the model computes: the logprobs of a few tokens, by both.

That two tensors are equal says nothing of what a kernel really reads; this does. It finds a kernel
that kept a packed copy of former weights, and a model that vLLM understands otherwise.

Shapes: L tokens, V vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch

from plexrl.errors import StaleWeightsError

if TYPE_CHECKING:
    from torch import nn

TOKENS = 16
TOLERANCES = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (0.02, 0.04)}
"""By the weights' dtype: how far a logprob may be off, at least and as a share of the largest. In
bfloat16 two right orders of summation differ by a few steps of 2^-8 of a logit."""


def probe_tokens(vocabulary: int, sequence_tokens_max: int) -> list[int]:
    """Token ids spread over the vocabulary; room for one more is left."""
    count = min(TOKENS, sequence_tokens_max - 1)
    return [(3 + 7919 * index) % vocabulary for index in range(count)]


@torch.no_grad()
def model_logprobs(model: "nn.Module", tokens: list[int]) -> torch.Tensor:
    """The model's own logprobs of `tokens[1:]`, each given those before it: float32 `[L - 1]`."""
    row = torch.tensor([tokens], device=next(model.parameters()).device)
    logits: Any = model(input_ids=row, use_cache=False).logits
    logprobs_LV = logits[0, :-1].float().log_softmax(dim=-1)
    found_L: torch.Tensor = logprobs_LV.gather(-1, row[0, 1:, None])[:, 0]
    return found_L.cpu()


def check_logprobs(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises `StaleWeightsError` where vLLM's logprobs `found` are not those `wanted`."""
    least, share = TOLERANCES[dtype]
    allowed = least + share * float(wanted.abs().max())
    error = float((found - wanted).abs().max())
    # A comparison with what is no number is false, and that must count as different.
    if not error <= allowed:
        raise StaleWeightsError(
            f"vLLM's logprobs are up to {error:.3g} off those of the weights it was given last; "
            f"{allowed:.3g} is allowed in {dtype}. It generates nothing until an update is right: "
            "sync weights again, or use backend 'torch'",
            error=error,
            allowed=allowed,
        )
