"""PlexRL's reproducible sampling inside vLLM's sampler.

vLLM uses one random generator per request, which restarts when a request is removed and added
again. PlexRL's randomness is a hash of seed, row, position and token. So a sample draws the same
tokens as in the `torch` engine, whatever else runs, also after preemptions and weight updates.

Shapes: N rows of the batch, V vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from plexrl.wire.operations import SamplingParams
from plexrl.worker.rollout.sampling import RowSampling, draw

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate

DRAW = "plexrl_draw"
"""Key of a request's `extra_args`: `(temperature, top_p, top_k, stream)`."""


def draw_arguments(
    sampling: SamplingParams, stream: int
) -> dict[str, tuple[float, float, int, int]]:
    """`extra_args` of the request for a row with this random stream."""
    return {DRAW: (sampling.temperature, sampling.top_p, sampling.top_k, stream)}


class RowDraw(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed for type checks
    """Draws each row's token, and masks all others, so that vLLM's greedy choice takes it.

    vLLM computes the logprobs that it reports before any processor, so they are the model's own.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._device = device
        self._rows: dict[int, tuple[tuple[float, float, int, int], list[int]]] = {}
        """By index in the batch: the arguments of `draw`, and vLLM's own list of drawn tokens."""

    def is_argmax_invariant(self) -> bool:
        """False: the processor changes the argmax, so vLLM must call it for greedy requests."""
        return False

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Follow rows that left, joined or moved."""
        process_dict_updates(self._rows, batch_update, _row_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask logits `[N, V]`, in place. Greedy rows do not change."""
        drawing = [index for index, (how, _) in sorted(self._rows.items()) if how[0] > 0]
        if not drawing:
            return logits
        temperature, top_p, top_k, stream = zip(
            *(self._rows[index][0] for index in drawing), strict=True
        )
        drawn = [len(self._rows[index][1]) for index in drawing]
        at = torch.tensor(drawing, device=self._device)
        sampling = RowSampling(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=self._device),
            top_p=torch.tensor(top_p, dtype=torch.float32, device=self._device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=self._device),
            stream=torch.tensor(stream, dtype=torch.int64, device=self._device),
        )
        position = torch.tensor(drawn, dtype=torch.int64, device=self._device)
        token = draw(logits[at].log_softmax(dim=-1), sampling, position)
        logits[at] = -torch.inf
        logits[at, token] = 0.0
        return logits


def _row_state(
    params: Any, _prompt: list[int] | None, drawn: list[int]
) -> tuple[tuple[float, float, int, int], list[int]] | None:
    """The state that `RowDraw` keeps of a row; None: the row is not PlexRL's."""
    if not params.extra_args or DRAW not in params.extra_args:
        return None
    return params.extra_args[DRAW], drawn
