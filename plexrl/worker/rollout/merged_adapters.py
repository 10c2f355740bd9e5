"""Merges low-rank adapters into a rollout's weights after every weight sync.

The engine computes from merged weights. The same arena also holds the pulled adapters and the base
weights. Every merge starts from the base weights, so rounding errors do not accumulate.

Shapes: X inputs, Y outputs of a layer, K the adapters' rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from plexrl.model.lora import LoraSpec, adapter_names
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.worker.state.arena_tensors import ArenaLayout, view, whole_box

BASE_SUFFIX = "/base"
"""Suffix of the name of a weight without adapters. It is a buffer: no trainer publishes it."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer that has an adapter."""

    weight: str
    base: StateSlice
    down: StateSlice
    up: StateSlice


class MergedAdapters:
    """The adapters of one rollout."""

    def __init__(
        self, lora: LoraSpec, layout: ArenaLayout, shapes: Mapping[str, tuple[int, ...]], dtype: str
    ) -> None:
        """Add slices to `layout` for adapters on the weights that `lora` targets. `shapes` has all
        weights, by name; `dtype` is the weights' dtype in the spelling of `StateSlice`."""
        self._scale = lora.scale
        self._layers: list[_Layer] = []
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            if module == name or module.rpartition(".")[2] not in lora.targets:
                continue
            outputs, inputs = shape
            down, up = (
                StateKey(part=StatePart.PARAMETER, name=adapter_name)
                for adapter_name in adapter_names(module)
            )
            base = StateKey(part=StatePart.BUFFER, name=name + BASE_SUFFIX)
            self._layers.append(
                _Layer(
                    name,
                    layout.add(base, whole_box(shape), dtype),
                    layout.add(down, whole_box((lora.rank, inputs))),
                    layout.add(up, whole_box((outputs, lora.rank))),
                )
            )

    @property
    def slices(self) -> tuple[StateSlice, ...]:
        """The adapters: a sync pulls them, and checkpoints contain them."""
        return tuple(piece for layer in self._layers for piece in (layer.down, layer.up))

    def move_in(self, arena: WorkerArena, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` as the base weights. The adapters are zero at first."""
        self._arena = arena
        self._weights = weights
        for layer in self._layers:
            view(arena, layer.base).copy_(weights[layer.weight])

    def merge(self) -> None:
        """Set the weights to base + scale · B A, computed in float32."""
        for layer in self._layers:
            down_KX = view(self._arena, layer.down)
            up_YK = view(self._arena, layer.up)
            base_YX = view(self._arena, layer.base).float()
            self._weights[layer.weight].copy_(base_YX + self._scale * (up_YK @ down_KX))
