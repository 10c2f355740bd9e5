"""vLLM as a rollout backend: weights in an arena, results in the wire format."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from plexrl.model.memory.device_memory import device_memory
from plexrl.model.memory.kv_cache import kv_token_bytes
from plexrl.statemanager.layout.keys import StatePart
from plexrl.worker.models import LaidOutModel, named_parameters
from plexrl.worker.rollout.engine.backend import EngineBackend
from plexrl.worker.rollout.rollout_engine import end_tokens
from plexrl.worker.rollout.vllm.engine import VllmEngine
from plexrl.worker.rollout.vllm.launch import start_engine, vllm_errors_explained
from plexrl.worker.rollout.vllm.probe import GatheredWeights, model_logprobs, probe_tokens
from plexrl.worker.rollout.vllm.weights import ArenaWeights, free_memory, watch_loading
from plexrl.worker.state.arena_tensors import ARENA_DTYPES, TORCH_DTYPES, ShardBox

if TYPE_CHECKING:
    from torch import nn


class VllmRolloutBackend(EngineBackend[VllmEngine]):
    """One worker's vLLM engine, with the whole model or one tensor-parallel rank's part.

    `lay_out` raises `InvalidRequestError` if vLLM cannot run the model. `materialise` and every
    method that replaces weights raise `StaleWeightsError` if vLLM's results differ from those of
    `transformers`; with several ranks the next step of the engine does.
    """

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """Use the loaded weights."""
        del parts
        self.engine.weights_changed(self.engine.weights_seq)

    @property
    def lay_out_bytes(self) -> int:
        """vLLM makes its model and its cache, and computes, before the arena is reserved."""
        terms = device_memory(self._spec).terms
        return sum(term.nbytes for term in terms if not term.stays)

    def gather_at_start(self, value: str) -> list[str]:
        """vLLM's start is a collective of all ranks of the deployment, if they have groups."""
        if self._ranks is None:
            return [value]
        found = [""] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def _arrange(self, model: "nn.Module") -> dict[str, ShardBox]:
        spec, dtype = self._spec, TORCH_DTYPES[ARENA_DTYPES[self._spec.dtype]]
        self._started = start_engine(
            model,
            dtype=dtype,
            slots=spec.max_concurrent_samples,
            sequence_tokens_max=spec.max_sequence_tokens,
            kv_token_bytes=kv_token_bytes(spec),
            kv_bytes_max=spec.kv_cache_bytes,
            on_gpu=bool(self._device.uuid),
            tp=spec.layout.tp,
        )
        weights = {
            name: torch.empty(each.shape, dtype=dtype) for name, each in named_parameters(model)
        }
        divides = self._ranks is not None
        self._pieces = watch_loading(self._started.model, weights, divides=divides)
        if self._device.uuid:
            # Memory for the weights is lent to the arena next: not twice as much is to be taken.
            free_memory(self._started.model)
            self._device.free_cached()
        elements = {name: each.numel() for name, each in self._started.model.named_parameters()}
        last = {piece.parameter: piece for piece in self._pieces}
        # Weights that vLLM joins are contiguous. A padded parameter gets reserved elements behind
        # it, which are never read.
        return {
            piece.name: replace(piece.box, reserve=elements[piece.parameter] - piece.start)
            if piece is last[piece.parameter]
            else piece.box
            for piece in self._pieces
        }

    def _start(self, model: "nn.Module") -> VllmEngine:
        config: Any = model.config
        # Some kernels refuse a model only at their first use, which is the engine's probe.
        with vllm_errors_explained():
            return VllmEngine(
                self._started,
                ArenaWeights(self._started.model, self._weights, self._pieces),
                ends=end_tokens(model),
                sequence_tokens_max=self._spec.max_sequence_tokens,
                dtype=TORCH_DTYPES[ARENA_DTYPES[self._spec.dtype]],
                probe=probe_tokens(config.vocab_size, self._spec.max_sequence_tokens),
                wanted=self._probe_of(model),
                ranks=self._ranks,
            )

    def _probe_of(self, model: "nn.Module") -> Callable[[list[int]], torch.Tensor]:
        """Computes logprobs from the weights in the arena, or in those of all ranks."""
        if self._ranks is None:
            return lambda tokens: model_logprobs(model, tokens)
        gathered = LaidOutModel(model, GatheredWeights(self._ranks, self._weights, self._boxes))

        def of_all_ranks(tokens: list[int]) -> torch.Tensor:
            with gathered.streamed(at_once=False):
                return model_logprobs(model, tokens)

        return of_all_ranks
