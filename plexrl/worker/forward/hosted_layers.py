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

from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.worker.forward.layer_stream import LayerStream
from plexrl.worker.models import LaidOutModel, named_parameters
from plexrl.worker.state.arena_tensors import TORCH_DTYPES, ArenaLayout, span, view, whole_box
from plexrl.worker.state.device import CPU, WorkerDevice


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's bytes in host memory."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hosting:
    """Decoder layers in host memory, and where they will be in the arena."""

    layers: Sequence[nn.Module]
    sources: Sequence[torch.Tensor]
    """Each layer's bytes in host memory."""
    slots: Sequence[tuple[int, int]]
    """Offset and size of each slot."""
    offsets: Mapping[str, int]
    """Name of a parameter → its offset in the arena."""


class ModelMemory:
    """The arenas of one rank, and the parameters in them."""

    def __init__(
        self,
        laid_out: LaidOutModel,
        *,
        dtype: str,
        layers_on_device: int | None,
        device: WorkerDevice = CPU,
    ) -> None:
        """Reserves the arena on `device`, and writes hosted layers to host memory, as `dtype` (of
        `ARENA_DTYPES`).

        `layers_on_device` is the number of slots; None, or all layers: none is hosted.
        """
        self._laid_out = laid_out
        self._device = device
        self._dtype = dtype
        named = dict(named_parameters(laid_out.model))
        layers = _layers(laid_out.model)
        is_hosted = layers_on_device is not None and layers_on_device < len(layers)
        hosted = [_names(named, layer) for layer in layers] if is_hosted else []
        layout = ArenaLayout()
        in_layers = {name for names in hosted for name in names}
        for name, parameter in named.items():
            if name not in in_layers:
                layout.add(_key(name), whole_box(tuple(parameter.shape)), dtype)
        self.slices: tuple[StateSlice, ...] = tuple(layout.slices)
        self.host_arena: HostArena | None = None
        self.stream: LayerStream | None = None
        self._hosting: _Hosting | None = None
        if not is_hosted:
            self.arena = device.make_arena(layout.nbytes)
        else:
            assert layers_on_device is not None
            self._hosting = self._host_layers(named, layers, hosted, layout, layers_on_device)

    def materialise(self) -> None:
        """Write the other parameters to the arena, which has memory from now on, and let the model
        use both."""
        values: dict[str, torch.Tensor] = {}
        for piece in self.slices:
            if not self._is_in_host(piece):
                home = values[piece.key.name] = view(self.arena, piece)
                home.copy_(self._laid_out.read(piece.key.name, (slice(None),) * home.dim()))
        if self._hosting is not None:
            values |= self._slots(self._hosting)
        self._laid_out.replace_parameters(values)
        self._laid_out.forget()

    def _host_layers(
        self,
        named: Mapping[str, nn.Parameter],
        layers: Sequence[nn.Module],
        hosted: Sequence[Sequence[str]],
        layout: ArenaLayout,
        count: int,
    ) -> "_Hosting":
        """Make both arenas, and fill the hosted layers."""
        # Sizes of layers do not depend on where host memory begins.
        sizes = ArenaLayout()
        largest = max(_place(sizes, named, names, self._dtype).nbytes for names in hosted)
        slots = [layout.skip(largest, "U8") for _ in range(count)]
        self.arena = self._device.make_arena(layout.nbytes)
        # A GPU rounds the size up.
        self._host_start = host_start(self.arena.nbytes)
        host = ArenaLayout(self._host_start)
        places = [_place(host, named, names, self._dtype) for names in hosted]
        self.slices += tuple(host.slices)
        self.host_arena = HostArena(host.nbytes - self._host_start)
        # The buffer, unlike its address, keeps the memory mapped while a layer refers to it.
        whole = torch.frombuffer(self.host_arena.buffer, dtype=torch.uint8)
        for piece in host.slices:
            target = _view(whole, piece, self._host_start)
            target.copy_(self._laid_out.read(piece.key.name, (slice(None),) * target.dim()))
        by_name = {piece.key.name: piece for piece in host.slices}
        offsets = {
            name: slots[index % count] + by_name[name].arena_offset - place.start
            for index, (place, names) in enumerate(zip(places, hosted, strict=True))
            for name in names
        }
        return _Hosting(
            layers=layers,
            sources=[whole[p.start - self._host_start :][: p.nbytes] for p in places],
            slots=[(slot, largest) for slot in slots],
            offsets=offsets,
        )

    def _slots(self, hosting: "_Hosting") -> dict[str, torch.Tensor]:
        """The hosted layers' parameters by name, as views of the slots in which they will be."""
        named = dict(named_parameters(self._laid_out.model))
        targets = [span(self.arena, slot, nbytes, "U8") for slot, nbytes in hosting.slots]
        assert self.host_arena is not None
        self.stream = LayerStream(hosting.layers, hosting.sources, targets)
        self.arena.users.add(self.stream.drain)
        self.host_arena.users.add(self.stream.drain)
        return {
            name: span(self.arena, offset, named[name].numel(), self._dtype).view(named[name].shape)
            for name, offset in hosting.offsets.items()
        }

    def write(self, values: Mapping[StateSlice, torch.Tensor]) -> None:
        """Replace all parameters, by slice. Raises as `HostArena.writing`; then nothing changes."""
        in_host = [piece for piece in self.slices if self._is_in_host(piece)]
        if self.host_arena is not None:
            with self.host_arena.writing() as at:
                memory = (ctypes.c_ubyte * self.host_arena.nbytes).from_address(at.target)
                target = torch.frombuffer(memory, dtype=torch.uint8)
                for piece in in_host:
                    _view(target, piece, self._host_start).copy_(values[piece])
        for piece in self.slices:
            if not self._is_in_host(piece):
                view(self.arena, piece).copy_(values[piece])

    def _is_in_host(self, piece: StateSlice) -> bool:
        return self.host_arena is not None and piece.arena_offset >= self._host_start


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


def _view(memory: torch.Tensor, piece: StateSlice, start: int) -> torch.Tensor:
    """A slice in host memory whose offsets begin at `start`."""
    first = piece.arena_offset - start
    return memory[first : first + piece.nbytes].view(TORCH_DTYPES[piece.dtype]).view(piece.shape)
