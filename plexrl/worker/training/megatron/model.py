"""The `megatron` training backend: a GPT model of megatron-core with all its state in arenas.

Megatron implements tensor, pipeline, data and expert parallelism, the reduction of gradients, and
the all-gather of updated parameters.

With `compute_dtype="bfloat16"` Megatron's parameters, activations and messages between stages are
bfloat16. Each data rank keeps its share of the parameters in float32, and steps that; gradients are
summed and reduced in float32, and updated parameters are all-gathered in bfloat16.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from plexrl.model.architecture.cut import reduces_gradients, splits_tokens
from plexrl.model.layout import check_cut, megatron_dimensions
from plexrl.statemanager.layout.keys import StatePart
from plexrl.wire.operations import AdamParams
from plexrl.worker.batches.logprobs import TokenValues, Wanted
from plexrl.worker.batches.packing import MicroBatch
from plexrl.worker.models import lay_out_model
from plexrl.worker.models.activation_checkpointing import checkpoint_activations
from plexrl.worker.state.arena_tensors import ParameterPiece, view
from plexrl.worker.training.megatron.groups import join_groups
from plexrl.worker.training.megatron.network.gpt import make_network, place_parameters
from plexrl.worker.training.megatron.parameter_pieces import is_replicated, pieces_by_parameter
from plexrl.worker.training.megatron.pipeline import Pipeline
from plexrl.worker.training.megatron.shims import buffers_in, install_shims
from plexrl.worker.training.megatron.state import BufferParameter, BufferPlan, MegatronState
from plexrl.worker.training.model import LossOfBatch, TrainingModel

PADDED_FROM_RANKS = 8
"""With more data ranks, Megatron's default padding does not align shares as the arena needs."""


class MegatronModel(TrainingModel):
    """A `TrainingModel` on megatron-core."""

    _state: MegatronState

    def lay_out(self) -> None:
        """As `TrainingModel.lay_out`.

        Raises:
            InvalidRequestError: Megatron cannot run the model.
            LayoutError: the layout cannot cut it.
        """
        layout, coordinates = self._rank.layout, self._rank.coordinates
        self._laid_out = lay_out_model(self._rank.spec.model)
        model = self._keep_configuration(self._laid_out.model)
        self._sizes = megatron_dimensions(model.config.to_dict())
        head = self._rank.spec.model.head
        if head == "value":
            # Nothing shares the embedding of a model that predicts no tokens.
            self._sizes = replace(self._sizes, is_tied=False)
        check_cut(self._sizes, layout)
        install_shims()
        join_groups(layout)
        dtype = getattr(torch, self._rank.spec.compute_dtype)
        rotary = model.model.rotary_emb
        self._network = make_network(self._sizes, layout, coordinates, rotary, dtype, head)
        if self._rank.spec.activation_checkpointing:
            checkpoint_activations(self._network.decoder.layers)
        # This one is on `meta`, and says where each parameter will be in the buffers.
        _, buffers = self._distributed(
            lambda elements, dtype: torch.zeros(elements, dtype=dtype, device="meta")
        )
        self._pieces = pieces_by_parameter(self._sizes, layout, coordinates, head)
        names = {parameter: name for name, parameter in self._network.named_parameters()}
        self._state = MegatronState(
            [self._plan(buffer, self._pieces, names) for buffer in buffers],
            reduces=reduces_gradients(self._sizes, layout),
            compute_dtype=self._rank.spec.compute_dtype,
            optimizer=self._rank.spec.optimizer,
            make_arena=self._rank.device.make_arena,
        )

    def materialise(self) -> None:
        self._state.bind()
        place_parameters(self._network, self._rank.device.torch_device)
        pairs = zip(self._state.parameters, self._state.scratch, strict=True)
        memory = chain.from_iterable(pairs)
        self._chunk, _ = self._distributed(lambda *_: next(memory))
        self._read_weights()
        self._laid_out.forget()
        self._is_gathered = not self._state.casts
        layout, coordinates = self._rank.layout, self._rank.coordinates
        self._pipeline = Pipeline(
            self._chunk,
            vocabulary=self._sizes.vocabulary,
            head=self._rank.spec.model.head,
            is_last=coordinates.pp == layout.pp - 1,
            place=self._rank.device.place,
            token_multiple=layout.tp if splits_tokens(self._sizes, layout) else 1,
        )

    def before_offload(self) -> None:
        """Do nothing: no state outside of the arenas is derived from them."""

    def after_load(self, *, gradients_loaded: bool) -> None:
        self._state.clear_padding()
        self._is_gathered = not self._state.casts
        if not gradients_loaded:
            self.zero_gradients()

    def forward(self, batches: Sequence[MicroBatch], wanted: Wanted) -> list[TokenValues]:
        self._gather_after_load()
        return self._pipeline.run(batches, None, wanted)

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: LossOfBatch, wanted: Wanted
    ) -> list[torch.Tensor]:
        self._gather_after_load()
        self._state.start_backward()
        found = self._pipeline.run(batches, loss, wanted)
        finalize_model_grads([self._chunk])
        self._state.take_reduced()
        return [each[self.output] for each in found]

    def step(self, params: AdamParams, *, gradient_factor: float) -> None:
        self._state.step(params, gradient_factor)
        self._gather()

    def step_in_host(self, params: AdamParams, *, gradient_factor: float) -> None:
        """As `TrainingModel.step_in_host`. Float32 parameters, which every data rank stores whole,
        are gathered."""
        self._state.step(params, gradient_factor)
        buffers = [*self._chunk.buffers, *self._chunk.expert_parallel_buffers]
        if self._state.casts:
            return
        for buffer, flat in zip(buffers, self._state.parameters, strict=True):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel()
                whole = flat[bucket.offset : bucket.offset + size]
                own = whole.chunk(group.size())[group.rank()]
                dist.all_gather_into_tensor(whole, own.clone(), group=group)

    def _gather_after_load(self) -> None:
        """Gather the parameters unless they are loaded or gathered. A load itself does not, because
        another rank's load may fail, and a collective would wait for that rank."""
        if not self._is_gathered:
            self._gather()

    def _gather(self) -> None:
        """Give every data rank all parameters as they are in the shares."""
        self._state.cast()
        for group in (*self._chunk.bucket_groups, *self._chunk.expert_parallel_bucket_groups):
            group.start_param_sync(force_sync=True)
        self._is_gathered = True

    def _plan(
        self, buffer: Any, pieces: dict[str, tuple[ParameterPiece, ...]], names: dict[Any, str]
    ) -> BufferPlan:
        parameters = [
            BufferParameter(
                pieces=pieces[names[parameter]],
                first=first,
                last=last,
                is_counted=self._counts(parameter, pieces[names[parameter]]),
            )
            for parameter, (first, last, _) in buffer.param_index_map.items()
        ]
        group = buffer.data_parallel_group
        shares = []
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // group.size()
            first = bucket.offset + group.rank() * size
            shares.append((first, first + size))
        parameters.sort(key=lambda each: each.first)
        return BufferPlan(elements=buffer.numel, parameters=tuple(parameters), shares=tuple(shares))

    def _counts(self, parameter: Any, pieces: tuple[ParameterPiece, ...]) -> bool:
        """Whether this rank's copy counts for the gradient norm: only the first copy does."""
        if getattr(parameter, "shared", False):
            # This is the last stage's copy of a tied embedding.
            return False
        if not getattr(parameter, "allreduce", True):
            # Tensor ranks are among the replicas of an expert, each of which owns another share.
            return True
        return self._rank.coordinates.tp == 0 or not is_replicated(pieces)

    def _distributed(
        self, memory: Callable[[int, torch.dtype], torch.Tensor]
    ) -> tuple[Any, list[Any]]:
        """Megatron's data parallelism with its buffers in `memory`, as for `buffers_in`, which the
        network's parameters become views of. Returns it and the buffers."""
        layout = self._rank.layout
        with buffers_in(memory):
            chunk = DistributedDataParallel(
                self._network.config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=True,
                    pad_buckets_for_high_nccl_busbw=(
                        max(layout.dp * layout.cp, layout.expert_dp) > PADDED_FROM_RANKS
                    ),
                ),
                self._network,
            )
        return chunk, [*chunk.buffers, *chunk.expert_parallel_buffers]

    def _read_weights(self) -> None:
        """Read this rank's boxes of the Hugging Face model."""
        found = [piece for piece in self.slices() if piece.key.part == StatePart.PARAMETER]
        for each in sorted(found, key=lambda each: each.key.name):
            ends = zip(each.offset, each.shape, strict=True)
            index = tuple(slice(first, first + extent) for first, extent in ends)
            view(self.arena, each).copy_(self._laid_out.read(each.key.name, index))
