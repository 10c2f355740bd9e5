"""Checks that vLLM computes with the current weights, by the logprobs of a few tokens.

Equal tensors do not prove which memory a kernel reads; equal logprobs do. The check detects a
kernel with a packed copy of previous weights, and a model that vLLM implements differently. If the
weights lie on several ranks, each module's are gathered while it computes.

Shapes: L tokens, V vocabulary.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from plexrl.errors import StaleWeightsError
from plexrl.worker.models.weight_files import Index
from plexrl.worker.rollout.engine.tensor_parallel import RankGroup
from plexrl.worker.state.arena_tensors import ShardBox

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


class GatheredWeights:
    """Whole weights whose boxes are in the arenas of several ranks: `Weights` of
    `plexrl.worker.models`, with the arena's device and dtype.

    Every rank reads the same weights in the same order, because each read is a collective.
    """

    def __init__(
        self, ranks: RankGroup, own: Mapping[str, torch.Tensor], boxes: Mapping[str, ShardBox]
    ) -> None:
        """`own`: this rank's boxes, whose places in the whole are `boxes`."""
        self._ranks = ranks
        self._own = own
        self._boxes = boxes
        self._all_boxes: list[dict[str, ShardBox]] = []
        """Boxes of each rank; empty before the first read."""

    def read(self, name: str, index: Index) -> torch.Tensor:
        """See `Weights.read`."""
        if not self._all_boxes:
            texts = self._ranks.gather(msgspec.json.encode(self._boxes).decode())
            self._all_boxes = [
                msgspec.json.decode(text, type=dict[str, ShardBox]) for text in texts
            ]
        own, boxes = self._own[name], [rank_boxes[name] for rank_boxes in self._all_boxes]
        if all(box.shape == box.global_shape for box in boxes):
            return own[index]
        padded = own.new_zeros(max(box.elements for box in boxes))
        padded[: own.numel()] = own.reshape(-1)
        # As bytes, which every backend sends.
        parts = [torch.empty_like(padded) for _ in boxes]
        received = [part.view(torch.uint8) for part in parts]
        dist.all_gather(received, padded.view(torch.uint8), group=self._ranks.process_group)
        whole = own.new_empty(boxes[0].global_shape)
        for box, part in zip(boxes, parts, strict=True):
            whole[box.index] = part[: box.elements].view(box.shape)
        return whole[index]

    def forget(self) -> None:
        """Do nothing: the probe keeps no state."""
