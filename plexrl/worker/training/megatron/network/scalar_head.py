"""An output layer that gives one number for each token, in place of one over the vocabulary."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


class ScalarHead(torch.nn.Module):
    """A product of each hidden state with one vector, which every tensor rank has.

    Every tensor rank computes the numbers of all tokens, and so has all of the gradient of both the
    numbers and the vector: none of it is summed over tensor ranks.

    Shapes: T tokens, S of them on this tensor rank, H hidden size.
    """

    def __init__(self, config: Any, tensor_group: Any) -> None:
        super().__init__()
        self._splits_tokens = config.sequence_parallel
        self._group = tensor_group
        self.weight = torch.nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=config.params_dtype)
        )

    def forward(self, hidden_S1H: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """Hidden states `[S, 1, H]` to numbers `[T, 1, 1]`, and no bias."""
        if self._splits_tokens:
            hidden_S1H = gather_from_sequence_parallel_region(
                hidden_S1H, tensor_parallel_output_grad=False, group=self._group
            )
        return hidden_S1H @ self.weight.T, None
