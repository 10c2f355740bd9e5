"""A norm for Megatron's layers. Megatron's wrapper of torch's norm refuses sequence parallelism.

With sequence parallelism each tensor rank normalises its own part of the tokens, so that its weight
has a part of the gradient. Megatron sums the parts of every parameter with this mark.
"""

from typing import Any

import torch


class RowNorm(torch.nn.RMSNorm):
    """An RMS norm over the last dimension, for Megatron's layers."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
