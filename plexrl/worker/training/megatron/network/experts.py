"""A rank's experts, multiplied in two grouped calls for all of them.

It replaces Megatron's `SequentialMLP`, which computes one expert after another, and `GroupedMLP`,
which needs a package of CUDA kernels. The weights of all experts are one parameter, as in Hugging
Face's models, so one box of it is one slice.

On GPUs of Hopper and Blackwell in bfloat16 torch's grouped product is one kernel. Elsewhere, and in
float32, torch itself multiplies one group after another.

Shapes: T tokens, sorted by expert; E experts of this rank; H hidden size, F inner size.
"""

from typing import Any

import torch
from torch.nn.functional import grouped_mm, silu


class GroupedExperts(torch.nn.Module):
    """The experts of a layer, for Megatron's `MoELayer`."""

    def __init__(self, experts: int, config: Any, **_: object) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
        self.gate_up_EFH, self.down_EHF = (
            torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype)) for shape in shapes
        )
        for parameter in self.parameters():
            # Megatron's mark of parameters whose replicas are not just all data ranks.
            spread = config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1
            parameter.allreduce = not spread  # type: ignore[attr-defined]

    def forward(
        self, hidden_TH: torch.Tensor, tokens_per_expert: torch.Tensor, probs_T: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Outputs `[T, H]`, each times its probability, and no bias. `tokens_per_expert` is `[E]`,
        int64, and may be on the CPU."""
        if not len(hidden_TH):
            # No kernel is asked for a product without rows. Other ranks exchange the gradients of
            # both arguments with this one, so both stay in the graph.
            return (hidden_TH * probs_T[:, None]).to(hidden_TH.dtype), None
        ends_E = tokens_per_expert.cumsum(0).to(hidden_TH.device, torch.int32)
        empty = (tokens_per_expert == 0).nonzero().squeeze(1).to(hidden_TH.device)
        gate_up_EHF, down_EFH = (
            _for_product(each, empty) for each in (self.gate_up_EFH, self.down_EHF)
        )
        gate_TF, up_TF = grouped_mm(hidden_TH, gate_up_EHF, offs=ends_E).chunk(2, dim=-1)
        scaled_TF = (silu(gate_TF) * up_TF * probs_T[:, None]).to(hidden_TH.dtype)
        return grouped_mm(scaled_TF, down_EFH, offs=ends_E), None


def _for_product(weights_EXY: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """The weights `[E, Y, X]`. `empty` are the experts without tokens: their gradients are 0, which
    the kernel of torch 2.13 does not write on Blackwell (pytorch#172439)."""
    weights_EYX = weights_EXY.transpose(1, 2)
    if weights_EYX.requires_grad and len(empty):
        weights_EYX.register_hook(  # type: ignore[no-untyped-call]  # torch has no types here
            lambda gradient_EYX: gradient_EYX.index_fill(0, empty, 0.0)
        )
    return weights_EYX
