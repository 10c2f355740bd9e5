"""A rollout's weights as adapters make them of a frozen model: merged anew at every sync.

The engine computes from whole weights. Beside them lie, in the same arena, the adapters as they
were pulled and what they are added to. A merge begins from that each time, so that no number of
syncs adds up rounding.

Shapes: X inputs, Y outputs of a layer, K the adapters' rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from plexrl.model.lora import LoraSpec, adapter_names
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.worker.state.arena_tensors import ArenaLayout, view

BASE_SUFFIX = "/base"
"""Behind a weight's name: the weight without adapters. A buffer, which no trainer publishes."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer with an adapter."""

    weight: str
    base: StateSlice
    down: StateSlice
    up: StateSlice


class MergedAdapters:
    """The adapters of one rollout."""

    def __init__(
        self, lora: LoraSpec, layout: ArenaLayout, shapes: Mapping[str, tuple[int, ...]], dtype: str
    ) -> None:
        """Takes places in `layout` for adapters on those of the weights (by name, with their
        shapes) that `lora` targets; `dtype` is the weights', as slices spell it."""
        self._scale = lora.scale
        self._layers: list[_Layer] = []
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            if module == name or module.rpartition(".")[2] not in lora.targets:
                continue
            outputs, inputs = shape
            down, up = adapter_names(module)
            self._layers.append(
                _Layer(
                    name,
                    _place(layout, StatePart.BUFFER, name + BASE_SUFFIX, (outputs, inputs), dtype),
                    _place(layout, StatePart.PARAMETER, down, (lora.rank, inputs)),
                    _place(layout, StatePart.PARAMETER, up, (outputs, lora.rank)),
                )
            )

    @property
    def slices(self) -> tuple[StateSlice, ...]:
        """The adapters: what is pulled, and what a checkpoint has."""
        return tuple(piece for layer in self._layers for piece in (layer.down, layer.up))

    def move_in(self, arena: Arena, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep `weights` as they are now as what adapters are added to; adapters are zero."""
        self._arena = arena
        self._weights = weights
        for layer in self._layers:
            view(arena, layer.base).copy_(weights[layer.weight])

    def merge(self) -> None:
        """Make the weights what the adapters in the arena make of them: base + scale · B A, worked
        out in float32."""
        for layer in self._layers:
            down_KX = view(self._arena, layer.down)
            up_YK = view(self._arena, layer.up)
            base_YX = view(self._arena, layer.base).float()
            self._weights[layer.weight].copy_(base_YX + self._scale * (up_YK @ down_KX))


def _place(
    layout: ArenaLayout, part: StatePart, name: str, shape: tuple[int, int], dtype: str = "F32"
) -> StateSlice:
    key = StateKey(part=part, name=name)
    return layout.add(key, global_shape=shape, offset=(0, 0), shape=shape, dtype=dtype)
