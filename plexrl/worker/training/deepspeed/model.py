"""The `deepspeed` training backend: a model trained by DeepSpeed's ZeRO-2.

Every rank computes with all parameters and keeps the state of one partition of them. The float32
parameters, gradients and moments of the partition are in the rank's arenas, in DeepSpeed's layout
(`partitions`). The parameters for computation are gathered when needed, and freed by an offload.
With `compute_dtype="bfloat16"` they are a cast, and gradients are summed in float32. With a host
optimizer DeepSpeed's CPUAdam steps the state (`cpu_adam`).
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import nn

from plexrl.errors import InvalidRequestError
from plexrl.wire.operations import AdamParams
from plexrl.worker.batches.logprobs import token_logprobs
from plexrl.worker.batches.packing import MicroBatch
from plexrl.worker.models import named_parameters
from plexrl.worker.state.host.optimizer import AdamKernel, adam_of_torch
from plexrl.worker.training.activation_checkpointing import checkpoint_activations
from plexrl.worker.training.deepspeed.cpu_adam import CpuAdam
from plexrl.worker.training.deepspeed.partitions import Partitions, partition
from plexrl.worker.training.flat_state import FlatState
from plexrl.worker.training.model import LossOfBatch, TrainingModel

if TYPE_CHECKING:
    from plexrl.worker.state.arena_tensors import ShardBox


class DeepSpeedModel(TrainingModel):
    """A `TrainingModel` on DeepSpeed."""

    _state: FlatState

    def lay_out(self) -> None:
        """As `TrainingModel.lay_out`.

        Raises:
            InvalidRequestError: DeepSpeed is not installed, or its kernel for an optimizer in host
                memory cannot be compiled.
        """
        zero = _zero()
        zero.connect()
        spec = self._rank.spec
        kernel = CpuAdam().update if spec.optimizer == "host" else adam_of_torch
        self._model = self._build_model()
        if spec.activation_checkpointing:
            checkpoint_activations(self._model.model.layers)
        parameters = dict(named_parameters(self._model))
        cut = partition(
            {name: tuple(parameter.shape) for name, parameter in parameters.items()},
            self._rank.layout.dp,
        )
        dp_rank = self._rank.coordinates.dp
        self._state = _state(cut, dp_rank, spec.optimizer, kernel)
        for box in cut.boxes(dp_rank):
            home = self._state.parameter(box.name, box.elements)
            home.copy_(parameters[box.name].detach()[box.index].flatten())
        for parameter in parameters.values():
            parameter.requires_grad_(True)
            parameter.data = parameter.data.to(getattr(torch, spec.compute_dtype))
        self._zero = zero.ArenaZeroOptimizer(
            _with_gaps(cut, parameters),
            partition=self._state.parameters,
            gradient=self._state.gradients,
        )

    def before_offload(self) -> None:
        """Free the gathered parameters."""
        self._zero.release()

    def after_load(self, *, gradients_loaded: bool) -> None:
        self._zero.release()
        if not gradients_loaded:
            self.zero_gradients()

    def forward(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        self._zero.gather()
        with torch.no_grad():
            return [self._logprobs(batch) for batch in batches]

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: LossOfBatch
    ) -> list[torch.Tensor]:
        self._zero.gather()
        values: list[torch.Tensor] = []
        for batch in batches:
            with self._zero.accumulating():
                logprobs_BL = self._logprobs(batch)
                loss(logprobs_BL, batch).backward()  # type: ignore[no-untyped-call]
            values.append(logprobs_BL.detach())
        return values

    def step(self, params: AdamParams, *, gradient_factor: float) -> None:
        self._zero.step_by(lambda: self._state.step(params, gradient_factor))

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        return token_logprobs(self._model(**batch.model_inputs).logits, batch)


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


def _state(cut: Partitions, index: int, optimizer: str, kernel: AdamKernel) -> FlatState:
    """Memory for partition `index`, with every parameter at the offset that DeepSpeed gives it."""
    boxes = cut.boxes(index)
    ends = [*(box.start for box in boxes[1:]), cut.size]
    shards: dict[str, ShardBox] = {
        box.name: replace(box, reserve=end - box.start)
        for box, end in zip(boxes, ends, strict=True)
    }
    lead = boxes[0].start if boxes else cut.size
    return FlatState(shards, optimizer=optimizer, lead=lead, kernel=kernel)


def _with_gaps(cut: Partitions, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    gaps = dict(cut.gaps())
    found = []
    for name, parameter in parameters.items():
        if name in gaps:
            found.append(nn.Parameter(torch.zeros(gaps[name], dtype=parameter.dtype)))
        found.append(parameter)
    if None in gaps:
        found.append(nn.Parameter(torch.zeros(gaps[None], dtype=parameter.dtype)))
    return found
