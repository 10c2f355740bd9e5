"""A forward model's memory: all of it on the device, or most decoder layers in host memory.

Without hosted layers each parameter has its place in the arena. With them the arena has the other
parameters, and behind these the slots of `plexrl.worker.forward.layer_stream`; host memory, which
the StateManager lends, has each layer's parameters without gaps, as a slot has them. The state is
complete in both cases: slots are no part of it.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.worker.forward.layer_stream import LayerStream
from plexrl.worker.models import named_parameters
from plexrl.worker.state.arena_tensors import TORCH_DTYPES, ArenaLayout, span, view, whole_box


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's bytes in host memory."""

    start: int
    nbytes: int


class ModelMemory:
    """The arenas of one rank, and the parameters in them."""

    def __init__(self, model: nn.Module, *, dtype: str, layers_on_device: int | None) -> None:
        """Moves the model's parameters to the arenas, cast to `dtype` (of `ARENA_DTYPES`).

        `layers_on_device` is the number of slots; None, or all layers: none is hosted.
        """
        named = dict(named_parameters(model))
        layers = _layers(model)
        is_hosted = layers_on_device is not None and layers_on_device < len(layers)
        hosted = [_names(named, layer) for layer in layers] if is_hosted else []
        device = ArenaLayout()
        in_layers = {name for names in hosted for name in names}
        for name, parameter in named.items():
            if name not in in_layers:
                device.add(_key(name), whole_box(tuple(parameter.shape)), dtype)
        self.slices: tuple[StateSlice, ...] = tuple(device.slices)
        self.host_arena: HostArena | None = None
        self.stream: LayerStream | None = None
        if not is_hosted:
            self.arena = Arena(device.nbytes)
        else:
            assert layers_on_device is not None
            self._host_layers(named, layers, hosted, device, dtype, layers_on_device)
        for piece in device.slices:
            _move(named[piece.key.name], view(self.arena, piece))

    def _host_layers(
        self,
        named: Mapping[str, nn.Parameter],
        layers: Sequence[nn.Module],
        hosted: Sequence[Sequence[str]],
        device: ArenaLayout,
        dtype: str,
        count: int,
    ) -> None:
        """Make both arenas, fill the hosted layers, and let their parameters be views of slots."""
        # Sizes of layers do not depend on where host memory begins.
        sizes = ArenaLayout()
        largest = max(_place(sizes, named, names, dtype).nbytes for names in hosted)
        slots = [device.skip(largest, "U8") for _ in range(count)]
        self.arena = Arena(device.nbytes)
        self._host_start = host_start(device.nbytes)
        host = ArenaLayout(self._host_start)
        places = [_place(host, named, names, dtype) for names in hosted]
        self.slices += tuple(host.slices)
        self.host_arena = HostArena(host.nbytes - self._host_start)
        whole = self._host_bytes(self.host_arena.address)
        by_name = {piece.key.name: piece for piece in host.slices}
        for index, (place, names) in enumerate(zip(places, hosted, strict=True)):
            for name in names:
                piece, parameter = by_name[name], named[name]
                _view(whole, piece, self._host_start).copy_(parameter.data)
                offset = slots[index % count] + piece.arena_offset - place.start
                parameter.data = span(self.arena, offset, parameter.numel(), dtype).view(
                    parameter.shape
                )
                parameter.requires_grad_(False)
        sources = [whole[p.start - self._host_start :][: p.nbytes] for p in places]
        targets = [span(self.arena, slot, largest, "U8") for slot in slots]
        self.stream = LayerStream(layers, sources, targets)

    def drain(self) -> None:
        """End copies to the device, whose memory or content is about to change."""
        if self.stream is not None:
            self.stream.drain()

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace all parameters, by name. Raises as `HostArena.writing`; then nothing changes."""
        self.drain()
        in_host = [piece for piece in self.slices if self._is_in_host(piece)]
        if self.host_arena is not None:
            with self.host_arena.writing() as at:
                target = self._host_bytes(at.target)
                for piece in in_host:
                    _view(target, piece, self._host_start).copy_(values[piece.key.name])
        for piece in self.slices:
            if not self._is_in_host(piece):
                view(self.arena, piece).copy_(values[piece.key.name])

    def _is_in_host(self, piece: StateSlice) -> bool:
        return self.host_arena is not None and piece.arena_offset >= self._host_start

    def _host_bytes(self, address: int) -> torch.Tensor:
        assert self.host_arena is not None
        memory = (ctypes.c_ubyte * self.host_arena.nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a model of the Llama family, in the order in which they run."""
    return list(getattr(model, model.base_model_prefix).layers)


def _names(named: Mapping[str, nn.Parameter], layer: nn.Module) -> list[str]:
    inside = {id(parameter) for parameter in layer.parameters()}
    return [name for name, parameter in named.items() if id(parameter) in inside]


def _place(
    layout: ArenaLayout, named: Mapping[str, nn.Parameter], names: Sequence[str], dtype: str
) -> _Layer:
    start = layout.nbytes
    for name in names:
        layout.add(_key(name), whole_box(tuple(named[name].shape)), dtype)
    return _Layer(start, layout.nbytes - start)


def _key(name: str) -> StateKey:
    return StateKey(part=StatePart.PARAMETER, name=name)


def _move(parameter: nn.Parameter, home: torch.Tensor) -> None:
    home.copy_(parameter.data)
    # A tied weight is one parameter object, so its other uses follow.
    parameter.data = home
    parameter.requires_grad_(False)


def _view(memory: torch.Tensor, piece: StateSlice, start: int) -> torch.Tensor:
    """A slice in host memory whose offsets begin at `start`."""
    first = piece.arena_offset - start
    return memory[first : first + piece.nbytes].view(TORCH_DTYPES[piece.dtype]).view(piece.shape)
