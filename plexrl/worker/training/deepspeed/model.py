"""The `deepspeed` training backend: a model trained by DeepSpeed's ZeRO-2.

Every rank computes with all parameters and keeps the state of one partition of them. The float32
parameters, gradients and moments of the partition are in the rank's arenas, in DeepSpeed's layout
(`partitions`). The parameters for computation are gathered when needed, and freed by an offload.
They have no memory before that: each rank reads its own partition only.
With `compute_dtype="bfloat16"` they are a cast, and gradients are summed in float32. With a host
optimizer DeepSpeed's CPUAdam steps the state (`cpu_adam`).
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import nn

from plexrl.errors import InvalidRequestError
from plexrl.wire.operations import AdamParams
from plexrl.worker.batches.logprobs import TokenValues, Wanted
from plexrl.worker.batches.packing import MicroBatch
from plexrl.worker.batches.values import outputs_of_tokens
from plexrl.worker.models import lay_out_model, named_parameters
from plexrl.worker.models.activation_checkpointing import checkpoint_activations
from plexrl.worker.state.arena_tensors import ShardBox
from plexrl.worker.state.host.optimizer import step_of_torch
from plexrl.worker.training.deepspeed.cpu_adam import CpuAdam
from plexrl.worker.training.deepspeed.partitions import Partitions, partition
from plexrl.worker.training.flat_state import FlatState
from plexrl.worker.training.model import LossOfBatch, TrainingModel
from plexrl.worker.training.muon import step_by_muon


class DeepSpeedModel(TrainingModel):
    """A `TrainingModel` on DeepSpeed."""

    _state: FlatState

    def lay_out(self) -> None:
        """As `TrainingModel.lay_out`.

        Raises:
            InvalidRequestError: DeepSpeed is not installed, or its kernel for an optimizer in host
                memory cannot be compiled.
        """
        spec, dp_rank = self._rank.spec, self._rank.coordinates.dp
        self._library = _zero()
        self._library.connect(self._rank.device)
        kernel = CpuAdam().update if spec.optimizer == "host" else step_of_torch
        self._laid_out = lay_out_model(spec.model)
        self._model = self._keep_configuration(self._laid_out.model)
        if spec.activation_checkpointing:
            checkpoint_activations(self._model.model.layers)
        shapes = {name: tuple(each.shape) for name, each in named_parameters(self._model)}
        self._cut = partition(shapes, self._rank.layout.dp)
        self._state = FlatState(
            _shards(self._cut, dp_rank),
            optimizer=spec.optimizer,
            lead=_lead(self._cut, dp_rank),
            kernel=kernel,
            make_arena=self._rank.device.make_arena,
        )

    def materialise(self) -> None:
        for box in self._cut.boxes(self._rank.coordinates.dp):
            home = self._state.parameter(box.name, box.elements)
            home.copy_(self._laid_out.read(box.name, box.index).flatten())
        self._laid_out.replace_parameters(
            {name: self._placeholder(*shape) for name, shape in self._cut.shapes.items()}
        )
        self._laid_out.forget()
        parameters = dict(named_parameters(self._model))
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self._zero = self._library.ArenaZeroOptimizer(
            self._with_gaps(parameters),
            partition=self._state.parameters,
            gradient=self._state.gradients,
        )
        self._zero.release()

    def before_offload(self) -> None:
        """Free the gathered parameters."""
        self._zero.release()

    def after_load(self, *, gradients_loaded: bool) -> None:
        self._zero.release()
        if not gradients_loaded:
            self.zero_gradients()

    def forward(self, batches: Sequence[MicroBatch], wanted: Wanted) -> list[TokenValues]:
        self._zero.gather()
        with torch.no_grad():
            return [self._values(batch, wanted) for batch in batches]

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: LossOfBatch, wanted: Wanted
    ) -> list[torch.Tensor]:
        self._zero.gather()
        values: list[torch.Tensor] = []
        for batch in batches:
            with self._zero.accumulating():
                found = self._values(batch, wanted)
                loss(found, batch).backward()  # type: ignore[no-untyped-call]
            values.append(found[self.output].detach())
        return values

    def step(self, params: AdamParams, *, gradient_factor: float) -> None:
        if params.optimizer == "muon":
            update = partial(step_by_muon, self._state, params, gradient_factor, self._cut.shapes)
        else:
            update = partial(self._state.step, params, gradient_factor)
        self._zero.step_by(update)

    def _values(self, batch: MicroBatch, wanted: Wanted) -> TokenValues:
        outputs = self._model(**batch.model_inputs).logits
        return outputs_of_tokens(self._rank.spec.model, outputs, batch, wanted)

    def _placeholder(self, *shape: int) -> torch.Tensor:
        """A parameter for DeepSpeed to move into its buffer: a single number takes memory."""
        device = self._rank.device.torch_device
        dtype = getattr(torch, self._rank.spec.compute_dtype)
        return torch.zeros((), dtype=dtype, device=device).expand(shape)

    def _with_gaps(self, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        gaps = {name: nn.Parameter(self._placeholder(size)) for name, size in self._cut.gaps()}
        found = []
        for name, parameter in parameters.items():
            found += [gaps[name]] if name in gaps else []
            found.append(parameter)
        return found + ([gaps[None]] if None in gaps else [])


def _zero() -> ModuleType:
    try:
        return importlib.import_module("plexrl.worker.training.deepspeed.zero")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise InvalidRequestError(
            "backend 'deepspeed' needs a package that is not installed on this node: run "
            "pip install --no-build-isolation 'plexrl[deepspeed]' there, or choose backend fsdp"
        ) from error


def _shards(cut: Partitions, index: int) -> dict[str, ShardBox]:
    """The boxes that partition `index` holds, with every parameter at the offset that DeepSpeed
    gives it."""
    boxes = cut.boxes(index)
    ends = [*(box.start for box in boxes[1:]), cut.size]
    return {
        box.name: replace(box, reserve=end - box.start)
        for box, end in zip(boxes, ends, strict=True)
    }


def _lead(cut: Partitions, index: int) -> int:
    """Elements of the gap that partition `index` begins with."""
    boxes = cut.boxes(index)
    return boxes[0].start if boxes else cut.size
