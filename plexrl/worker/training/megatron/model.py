"""The `megatron` training backend: a GPT model of megatron-core with all its state in one arena.

Megatron implements tensor, pipeline, data and expert parallelism, the reduction of gradients, and
the all-gather of updated parameters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from plexrl.model.layout import check_cut, megatron_dimensions
from plexrl.wire.operations import AdamParams
from plexrl.worker.batches.packing import MicroBatch
from plexrl.worker.state.arena_tensors import ParameterPiece
from plexrl.worker.training.activation_checkpointing import checkpoint_activations
from plexrl.worker.training.megatron.cpu_shim import install_cpu_shim
from plexrl.worker.training.megatron.groups import join_groups
from plexrl.worker.training.megatron.network import make_network
from plexrl.worker.training.megatron.parameter_pieces import is_replicated, pieces_by_parameter
from plexrl.worker.training.megatron.pipeline import Pipeline
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
        model = self._build_model()
        sizes = megatron_dimensions(model.config.to_dict())
        check_cut(sizes, layout)
        install_cpu_shim()
        join_groups(layout)
        network = make_network(sizes, layout, coordinates, model.model.rotary_emb)
        if self._rank.spec.activation_checkpointing:
            checkpoint_activations(network.decoder.layers)
        self._chunk = DistributedDataParallel(
            network.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                pad_buckets_for_high_nccl_busbw=layout.dp * layout.cp > PADDED_FROM_RANKS,
            ),
            network,
        )
        self._buffers = [*self._chunk.buffers, *self._chunk.expert_parallel_buffers]
        pieces = pieces_by_parameter(sizes, layout, coordinates)
        names = {parameter: name for name, parameter in network.named_parameters()}
        self._state = MegatronState(
            [self._plan(buffer, pieces, names) for buffer in self._buffers],
            reduces=layout.dp * layout.cp > 1
            or (layout.pp > 1 and sizes.is_tied)
            or (layout.tp > 1 and sizes.has_qk_norm),
        )
        self._move_in()
        _copy_in(network, pieces, dict(model.named_parameters()))
        self._pipeline = Pipeline(
            self._chunk, vocabulary=sizes.vocabulary, is_last=coordinates.pp == layout.pp - 1
        )

    def before_offload(self) -> None:
        """Nothing is derived from the arena."""

    def after_load(self, *, gradients_loaded: bool) -> None:
        self._state.clear_padding()
        if not gradients_loaded:
            self.zero_gradients()

    def forward(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        return self._pipeline.run(batches, None)

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: LossOfBatch
    ) -> list[torch.Tensor]:
        self._state.start_backward()
        found = self._pipeline.run(batches, loss)
        finalize_model_grads([self._chunk])
        self._state.take_reduced()
        return found

    def step(self, params: AdamParams, *, gradient_factor: float) -> None:
        if gradient_factor != 1.0:
            for flat in self._state.gradients:
                flat.mul_(gradient_factor)
        self._state.step(params)
        for group in (*self._chunk.bucket_groups, *self._chunk.expert_parallel_bucket_groups):
            group.start_param_sync(force_sync=True)

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
        return self._rank.coordinates.tp == 0 or not is_replicated(pieces)

    def _move_in(self) -> None:
        """Replace Megatron's buffers, and all views of them, by views of the arena."""
        for index, buffer in enumerate(self._buffers):
            buffer.param_data = self._state.parameters[index]
            buffer.grad_data = self._state.scratch[index]
            for parameter, (first, last, _) in buffer.param_index_map.items():
                parameter.data = buffer.param_data[first:last].view(parameter.shape)
                parameter.main_grad = buffer.grad_data[first:last].view(parameter.shape)
            for bucket in buffer.buckets:
                end = bucket.offset + bucket.grad_data.numel()
                bucket.param_data = buffer.param_data[bucket.offset : end]
                bucket.grad_data = buffer.grad_data[bucket.offset : end]


def _copy_in(
    network: Any, pieces: dict[str, tuple[ParameterPiece, ...]], source: dict[str, Any]
) -> None:
    """Copy the Hugging Face model's values to a rank's parameters."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            flat = parameter.data.view(-1)
            for piece in pieces[name]:
                home = flat[piece.start : piece.start + piece.elements]
                home.copy_(source[piece.name][piece.index].reshape(-1))
