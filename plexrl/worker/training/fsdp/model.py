"""The `fsdp` training backend: torch FSDP2 with all its state in one arena.

FSDP gathers from and reduces into views of the regions of `flat_state`. With tensor parallelism the
model's matrices are first cut by columns or rows, and the rows of each part are then sharded over
the data-parallel ranks that have that part.

A model that is gathered as a whole has its gradients reduced once for all micro-batches of a call.
They all exist unreduced in each backward anyway, so the peak of memory stays. A model that is
gathered layer by layer has them reduced for each micro-batch, so that only one layer's exist;
with `reduce_once` they are summed on each rank, in float32, and reduced in the last backward.

With `compute_dtype="bfloat16"` parameters are cast when they are gathered. In the arena parameters,
gradients (summed in float32) and optimizer state are float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from plexrl.model.layout import check_tensor_parallel
from plexrl.model.memory.state_terms import LAYERWISE_PARAMETERS
from plexrl.statemanager.layout.boxes import Box
from plexrl.wire.operations import AdamParams
from plexrl.worker.batches.logprobs import TokenValues, VocabularyShard, Wanted
from plexrl.worker.batches.packing import MicroBatch
from plexrl.worker.batches.values import outputs_of_tokens
from plexrl.worker.models import lay_out_model, named_parameters
from plexrl.worker.models.activation_checkpointing import checkpoint_activations
from plexrl.worker.state.arena_tensors import ShardBox
from plexrl.worker.training.flat_state import FlatState, sum_of_squares
from plexrl.worker.training.fsdp.adapters import add_adapters, state_name
from plexrl.worker.training.fsdp.frozen_base import FrozenBase, ModelFiles, model_files
from plexrl.worker.training.fsdp.sharded_parameter import ShardedParameter, sharded_parameters
from plexrl.worker.training.fsdp.tensor_parallel import cut_parameters, local_box, parallelize
from plexrl.worker.training.model import LossOfBatch, TrainingModel, TrainingRank
from plexrl.worker.training.muon import step_by_muon


class FsdpModel(TrainingModel):
    """A `TrainingModel` on torch FSDP2."""

    _state: FlatState
    _model: Any
    _reduces_once: bool
    """Gradients are reduced once for all micro-batches of a call."""

    def __init__(
        self, rank: TrainingRank, *, layerwise_parameters: int = LAYERWISE_PARAMETERS
    ) -> None:
        super().__init__(rank)
        self._layerwise_parameters = layerwise_parameters

    def lay_out(self) -> None:
        spec = self._rank.spec
        files = () if spec.lora is None else model_files(spec.model)
        self._laid_out = lay_out_model(spec.model)
        model = self._keep_configuration(self._laid_out.model)
        if spec.lora is None:
            for parameter in model.parameters():
                parameter.requires_grad_(True)
        else:
            add_adapters(model, spec.lora)
        mesh = self._cut_by_tensor_ranks(model)
        cuts = {name: local_box(parameter) for name, parameter in named_parameters(model)}
        self._cut = cut_parameters(model)
        self._model = self._shard_by_data_ranks(model, mesh)
        self._shards = sharded_parameters(model)
        # Adapters have been initialised; they are in no file.
        values = {name: shard.value for name, shard in self._shards.items()}
        self._initial = {name: value for name, value in values.items() if value is not None}
        self._boxes = {name: self._box(shard, cuts[name]) for name, shard in self._shards.items()}
        self._state = FlatState(
            {
                state_name(n): self._boxes[n]
                for n, shard in self._shards.items()
                if shard.is_trained
            },
            optimizer=spec.optimizer,
            make_arena=self._rank.device.make_arena,
        )
        frozen = {n: self._boxes[n] for n, shard in self._shards.items() if not shard.is_trained}
        self._base = self._lay_out_base(frozen, files)

    def materialise(self) -> None:
        with torch.no_grad():
            for name, shard in self._shards.items():
                if shard.is_trained:
                    self._materialise(name, shard)
                else:
                    assert self._base is not None
                    shard.bind(self._base.home(name), self._boxes[name].shape[0])
        self._laid_out.forget()

    @property
    def frozen_base(self) -> FrozenBase | None:
        """The frozen weights if only adapters are trained; they are not among the slices."""
        return self._base

    def before_offload(self) -> None:
        """Free the gathered parameters."""
        self._model.reshard()

    def after_load(self, *, gradients_loaded: bool) -> None:
        """As `TrainingModel.after_load`. Only the gathered parameters are derived, and
        `before_offload` has freed them."""
        if not gradients_loaded:
            self.zero_gradients()

    def forward(self, batches: Sequence[MicroBatch], wanted: Wanted) -> list[TokenValues]:
        with torch.no_grad():
            values = [self._values(batch, wanted) for batch in batches]
        self._model.reshard()
        return values

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: LossOfBatch, wanted: Wanted
    ) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        for index, batch in enumerate(batches):
            if self._reduces_once:
                self._model.set_requires_gradient_sync(index == len(batches) - 1)
            found = self._values(batch, wanted)
            # FSDP averages gradients over ranks; the loss is a sum over ranks.
            (loss(found, batch) * self._rank.layout.dp).backward()  # type: ignore[no-untyped-call]
            values.append(found[self.output].detach())
        self._model.reshard()
        return values

    def step(self, params: AdamParams, *, gradient_factor: float) -> None:
        if params.optimizer == "muon":
            # The values' names are those of `transformers`, in one order on all ranks.
            shapes = {
                state_name(name): self._boxes[name].global_shape
                for name, shard in self._shards.items()
                if shard.is_trained
            }
            step_by_muon(self._state, params, gradient_factor, shapes)
            return
        self._state.step(params, gradient_factor)

    def _squared_gradients(self) -> torch.Tensor:
        if self._rank.coordinates.tp == 0:
            return self._state.squared_gradients()
        # Only the first tensor rank counts parameters that every tensor rank has.
        return sum_of_squares(self._state.gradient(name).view(-1) for name in sorted(self._cut))

    def _values(self, batch: MicroBatch, wanted: Wanted) -> TokenValues:
        outputs = self._model(**batch.model_inputs).logits
        model = self._rank.spec.model
        return outputs_of_tokens(model, outputs, batch, wanted, self._vocabulary_shard)

    def _cut_by_tensor_ranks(self, model: Any) -> DeviceMesh | None:
        """Cut the model along `tp`; returns the mesh of both axes, or None if `tp` is 1."""
        self._vocabulary_shard: VocabularyShard | None = None
        layout = self._rank.layout
        if layout.tp == 1:
            return None
        check_tensor_parallel(self._rank.spec.model, layout)
        device = self._rank.device.torch_device.type
        # tp is the fastest axis of our ranks, which is a mesh's last dimension.
        mesh = init_device_mesh(device, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh["tp"])
        if self._rank.spec.model.head == "causal":
            first_token = local_box(model.lm_head.weight).offset[0]
            self._vocabulary_shard = VocabularyShard(first_token, mesh["tp"].get_group())
        return mesh

    def _shard_by_data_ranks(self, model: Any, mesh: DeviceMesh | None) -> FSDPModule:
        spec = self._rank.spec
        if spec.activation_checkpointing:
            checkpoint_activations(model.model.layers)
        if mesh is None:
            # Without a mesh torch would choose a GPU wherever there is one.
            device = self._rank.device.torch_device.type
            mesh = init_device_mesh(device, (self._rank.layout.dp,), mesh_dim_names=("dp",))
        options: dict[str, Any] = {"mesh": mesh["dp"]}
        if spec.compute_dtype != "float32":
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=getattr(torch, spec.compute_dtype), reduce_dtype=torch.float32
            )
        size = sum(parameter.numel() for parameter in model.parameters())
        gathers_whole = size < self._layerwise_parameters
        # Without other data ranks a reduction is a copy, and its result takes no memory.
        self._reduces_once = gathers_whole or (spec.reduce_once and self._rank.layout.dp > 1)
        if not gathers_whole:
            for layer in model.model.layers:
                fully_shard(layer, **options)
        fully_shard(model, **options)
        assert isinstance(model, FSDPModule)
        return model

    def _box(self, shard: ShardedParameter, cut: Box) -> ShardBox:
        """This rank's rows of its tensor rank's part."""
        padded = shard.padded_shape
        start = min(self._rank.coordinates.dp * padded[0], cut.shape[0])
        rows = min(padded[0], cut.shape[0] - start)
        return ShardBox(
            global_shape=shard.global_shape,
            offset=(cut.offset[0] + start, *cut.offset[1:]),
            shape=(rows, *cut.shape[1:]),
            reserve=shard.elements,
        )

    def _materialise(self, name: str, shard: ShardedParameter) -> None:
        """Write a trained shard to the arena, and make FSDP keep it there."""
        home, box = self._state.parameter(state_name(name), shard.elements), self._boxes[name]
        if name in self._initial:
            home.copy_(self._initial[name])
        elif box.elements:
            home[: box.elements].copy_(self._laid_out.read(name, box.index).flatten())
        shard.bind(home, box.shape[0], gradient=self._state.gradient(state_name(name)))

    def _lay_out_base(self, boxes: dict[str, ShardBox], files: ModelFiles) -> FrozenBase | None:
        """Memory for the frozen weights, which deployments share; None: all are trained."""
        if not boxes:
            return None
        return FrozenBase(
            self._rank.spec.model,
            files,
            boxes,
            lambda name: self._laid_out.read(name, boxes[name].index),
            make_arena=self._rank.device.make_arena,
        )
