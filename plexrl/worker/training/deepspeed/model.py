"""The `deepspeed` training backend: a model trained by DeepSpeed's ZeRO-2.

Every rank computes with all parameters and keeps the state of one partition of them. The float32
parameters, gradients and moments of the partition are in the rank's arenas, in DeepSpeed's layout
(`partitions`). The parameters for computation are gathered when needed, and freed by an offload.
With `compute_dtype="bfloat16"` they are a cast, and gradients are summed in float32. With a host
optimizer DeepSpeed's CPUAdam steps the state (`cpu_adam`).
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plexrl.errors import InvalidRequestError
from plexrl.wire.operations import AdamParams
from plexrl.worker.batches.logprobs import token_logprobs
from plexrl.worker.batches.packing import MicroBatch
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.state.host_optimizer import AdamKernel, adam_of_torch
from plexrl.worker.training.activation_checkpointing import checkpoint_activations
from plexrl.worker.training.deepspeed.cpu_adam import CpuAdam
from plexrl.worker.training.deepspeed.partitions import Box, Partitions, partition
from plexrl.worker.training.flat_model import FlatModel
from plexrl.worker.training.flat_state import FlatState, ShardBox
from plexrl.worker.training.model import LossOfBatch


class DeepSpeedModel(FlatModel):
    """A `TrainingModel` on DeepSpeed."""

    def build(self) -> None:
        """As `TrainingModel.build`.

        Raises:
            InvalidRequestError: DeepSpeed is not installed, or its kernel for an optimizer in host
                memory cannot be compiled.
        """
        zero = _zero()
        zero.connect()
        spec = self._rank.spec
        kernel = CpuAdam().update if spec.optimizer == "host" else adam_of_torch
        self._model = build_model(spec.model)
        if spec.activation_checkpointing:
            layers: Any = self._model.model.layers
            checkpoint_activations(layers)
        parameters = dict(named_parameters(self._model))
        cut = partition(
            {name: tuple(parameter.shape) for name, parameter in parameters.items()},
            self._rank.layout.dp,
        )
        dp_rank = self._rank.coordinates.dp
        self._state = _state(cut, dp_rank, spec.optimizer, kernel)
        for box in cut.boxes(dp_rank):
            _fill(self._state.parameter(box.name, math.prod(box.shape)), parameters[box.name], box)
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
        """As `TrainingModel.after_load`."""
        self._zero.release()
        if not gradients_loaded:
            self.zero_gradients()

    def forward(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """As `TrainingModel.forward`."""
        self._zero.gather()
        with torch.no_grad():
            return [self._logprobs(batch) for batch in batches]

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: LossOfBatch
    ) -> list[torch.Tensor]:
        """As `TrainingModel.forward_backward`."""
        self._zero.gather()
        values: list[torch.Tensor] = []
        for batch in batches:
            with self._zero.accumulating():
                logprobs_BL = self._logprobs(batch)
                loss(logprobs_BL, batch).backward()  # type: ignore[no-untyped-call]
            values.append(logprobs_BL.detach())
        return values

    def gradient_norm(self) -> float:
        """As `TrainingModel.gradient_norm`."""
        squared = self._state.gradients.square().sum()
        dist.all_reduce(squared)
        return float(squared.sqrt())

    def step(self, params: AdamParams, *, gradient_factor: float) -> None:
        """As `TrainingModel.step`."""
        self._zero.step_by(lambda: self._state.step(params, gradient_factor))

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        logits_BLV = self._model(
            input_ids=batch.tokens_BL, attention_mask=batch.valid_BL.long(), use_cache=False
        ).logits
        return token_logprobs(logits_BLV, batch)


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


def _fill(home: torch.Tensor, parameter: nn.Parameter, box: Box) -> None:
    rows = slice(box.offset[0], box.offset[0] + box.shape[0]) if box.shape else ...
    home.copy_(parameter.detach()[rows].flatten())


def _state(cut: Partitions, index: int, optimizer: str, kernel: AdamKernel) -> FlatState:
    """Memory for partition `index`, with every parameter at the offset that DeepSpeed gives it."""
    boxes = cut.boxes(index)
    ends = [*(box.start for box in boxes[1:]), cut.size]
    shards = {
        box.name: ShardBox(
            global_shape=box.global_shape,
            offset=box.offset,
            shape=box.shape,
            reserve=end - box.start,
        )
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
