"""Runs micro-batches through Megatron's pipeline schedules; the last stage computes logprobs, or
values.

Shapes: B rows, L tokens of the longest row; T tokens of all rows; V size of a tensor rank's part of
the vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from plexrl.model.spec import Head
from plexrl.worker.batches.logprobs import (
    TokenValues,
    VocabularyShard,
    Wanted,
    distribution_values,
)
from plexrl.worker.batches.packing import MicroBatch
from plexrl.worker.batches.values import values_at_positions
from plexrl.worker.training.megatron.packed_rows import PackedRows, pack_rows
from plexrl.worker.training.model import LossOfBatch

OUTPUTS: Mapping[Head, str] = {"causal": "logprobs", "value": "values", "reward": "scores"}
"""What a model computes, by its head: logprobs or values of tokens, float32 `[B, L]`, or the scores
of rows, float32 `[B]`: those of their last tokens."""


class Pipeline:
    """One pipeline stage, with one tensor rank's part of the vocabulary."""

    def __init__(
        self,
        chunk: Any,
        *,
        vocabulary: int,
        is_last: bool,
        place: Callable[[torch.Tensor], torch.Tensor],
        token_multiple: int = 1,
        head: Head = "causal",
    ) -> None:
        """`chunk` is Megatron's DistributedDataParallel; `vocabulary` is the size without padding.
        `place` copies a tensor to the device. A micro-batch is padded to a multiple of
        `token_multiple` tokens. `head` says what is computed (`OUTPUTS`)."""
        self._chunk = chunk
        self._vocabulary = vocabulary
        self._output = OUTPUTS[head]
        self._is_last = is_last
        self._place = place
        self._token_multiple = token_multiple
        self._context_rank = parallel_state.get_context_parallel_rank()
        self._context_ranks = parallel_state.get_context_parallel_world_size()
        self._run = get_forward_backward_func()

    def run(
        self, batches: Sequence[MicroBatch], loss: LossOfBatch | None, wanted: Wanted
    ) -> list[TokenValues]:
        """The output of every micro-batch and what is `wanted`, on its device; before the last
        stage zeros, of the output only.

        With `loss`, gradients are added to every parameter's `main_grad`.
        """
        found: list[TokenValues] = []

        def step(rows: Iterator[tuple[MicroBatch, PackedRows]], chunk: Any) -> Any:
            batch, packed_rows = next(rows)
            output = chunk(
                input_ids=packed_rows.tokens_T[None],
                position_ids=packed_rows.positions_T[None],
                attention_mask=packed_rows.row_map,
            )
            if not self._is_last:
                return output, None

            def finish(logits_1TV: torch.Tensor) -> tuple[Any, torch.Tensor, None]:
                if self._output == "scores":
                    scores_B = packed_rows.of_last_tokens(logits_1TV[0, :, 0].float())
                    found.append({"scores": scores_B})
                    return scores_B, torch.zeros((), dtype=torch.int, device=scores_B.device), None
                by_token = self._values(logits_1TV[0], packed_rows.targets_T, wanted)
                values = {name: packed_rows.unpacked(each) for name, each in by_token.items()}
                found.append({name: each.detach() for name, each in values.items()})
                value = values[self._output] if loss is None else loss(values, batch)
                return value, torch.zeros((), dtype=torch.int, device=value.device), None

            return output, finish

        def packed() -> Iterator[tuple[MicroBatch, PackedRows]]:
            for batch in batches:
                # Packed on the CPU: indices and lengths need no copy from the device.
                rows = pack_rows(
                    batch.on_host,
                    self._context_rank,
                    self._context_ranks,
                    token_multiple=self._token_multiple,
                )
                yield batch, rows.placed(self._place)

        # A schedule takes one step function for the whole batch, and an iterator of micro-batches.
        with torch.set_grad_enabled(loss is not None):
            self._run(
                forward_step_func=step,
                data_iterator=packed(),
                model=[self._chunk],
                num_microbatches=len(batches),
                seq_length=1,
                micro_batch_size=1,
                forward_only=loss is None,
            )
        return found or [self._nothing(batch) for batch in batches]

    def _nothing(self, batch: MicroBatch) -> TokenValues:
        zero = batch.tokens_BL.new_zeros((), dtype=torch.float32)
        shape = (batch.rows,) if self._output == "scores" else batch.tokens_BL.shape
        return {self._output: zero.expand(shape)}

    def _values(
        self, logits_TV: torch.Tensor, targets_T: torch.Tensor, wanted: Wanted
    ) -> TokenValues:
        if self._output == "values":
            return {"values": values_at_positions(logits_TV)}
        first = parallel_state.get_tensor_model_parallel_rank() * logits_TV.shape[1]
        size = self._vocabulary - first
        if size < logits_TV.shape[1]:
            # Padding of the vocabulary gets probability 0.
            padding_V = torch.arange(logits_TV.shape[1], device=logits_TV.device) >= size
            logits_TV = logits_TV.masked_fill(padding_V, float("-inf"))
        logits_TV = logits_TV.float()
        group = parallel_state.get_tensor_model_parallel_group()
        shard = VocabularyShard(first, group) if dist.get_world_size(group) > 1 else None
        found = distribution_values(logits_TV, wanted, shard)
        if wanted.entropy_gradient:
            # The loss overwrites its logits, and the entropy keeps them for the backward pass.
            logits_TV = logits_TV.clone()
        losses_1T: torch.Tensor = vocab_parallel_cross_entropy(logits_TV[None], targets_T[None])
        return {"logprobs": -losses_1T[0], **found}
