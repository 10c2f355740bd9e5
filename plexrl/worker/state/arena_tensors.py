"""Tensors in an arena: their offsets, and views of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.device.cuda.arena import ArenaBytes, CudaArena
from plexrl.statemanager.layout.keys import ARENA_ALIGNMENT, DTYPE_BYTES, StateKey, StateSlice

AnyArena = WorkerArena | HostArena
"""Memory on a device, or its stand-in in host memory."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


ARENA_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
"""A deployment's dtype, in the spelling of `StateSlice`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBox:
    """This rank's part of one tensor: `shape` elements from `offset` on, in every dimension."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """One extent is 0 if this rank holds no part."""
    reserve: int = 0
    """Elements to reserve for it, including padding, if they are more than its own."""

    @property
    def elements(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """Slices that index the whole tensor."""
        return tuple(
            slice(first, first + extent)
            for first, extent in zip(self.offset, self.shape, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPiece(ShardBox):
    """A box of a Hugging Face parameter, stored row-major in a framework's local memory."""

    name: str
    start: int
    """Offset in the local memory, in elements."""


def whole_box(shape: tuple[int, ...]) -> ShardBox:
    """The box of a rank that holds a whole tensor; `()` is one number."""
    return ShardBox(global_shape=shape, offset=(0,) * len(shape), shape=shape)


class ArenaLayout:
    """Assigns consecutive offsets in an arena that is allocated later."""

    def __init__(self, start: int = 0) -> None:
        """Offsets begin at `start`."""
        self.slices: list[StateSlice] = []
        self.nbytes = start
        """End of the assigned memory, including `start`."""

    def add(self, key: StateKey, box: ShardBox, dtype: str = "F32") -> StateSlice:
        """Add a slice, and reserve memory for it."""
        return self.place(key, box, self.skip(max(box.elements, box.reserve), dtype), dtype)

    def place(self, key: StateKey, box: ShardBox, offset: int, dtype: str = "F32") -> StateSlice:
        """Add a slice in reserved memory, at `offset` bytes."""
        piece = StateSlice(
            key=key,
            dtype=dtype,
            global_shape=box.global_shape,
            offset=box.offset,
            shape=box.shape,
            arena_offset=offset,
        )
        self.slices.append(piece)
        return piece

    def skip(self, elements: int, dtype: str = "F32") -> int:
        """Reserve `elements` without a slice, rounded up to the arena's alignment; returns their
        offset in bytes."""
        start, nbytes = self.nbytes, elements * DTYPE_BYTES[dtype]
        self.nbytes += -(-nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        return start


def view(arena: AnyArena, piece: StateSlice) -> torch.Tensor:
    """A slice as a tensor that shares the arena's memory."""
    elements = math.prod(piece.shape)
    return span(arena, piece.arena_offset, elements, piece.dtype).view(piece.shape)


def span(arena: AnyArena, arena_offset: int, elements: int, dtype: str = "F32") -> torch.Tensor:
    """`elements` consecutive elements from `arena_offset` (bytes) on, as a flat tensor."""
    nbytes = elements * DTYPE_BYTES[dtype]
    return whole(arena)[arena_offset : arena_offset + nbytes].view(TORCH_DTYPES[dtype])


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat view over tensors that lie next to each other in memory; None: they do not."""
    first = tensors[0].data
    end = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == end):
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def host_memory(arena: AnyArena) -> memoryview | None:
    """The arena's memory as this process addresses it; None: it is on a GPU."""
    buffer = getattr(arena, "buffer", None)
    assert buffer is None or isinstance(buffer, memoryview)
    return buffer


def whole(arena: AnyArena) -> torch.Tensor:
    """The whole arena as bytes, on its device. [nbytes] uint8. Keeps its addresses alive.

    On a GPU, memory must be attached when this is called, because torch queries the driver for its
    device. The tensor stays valid after an offload and the next load.
    """
    memory = host_memory(arena)
    if memory is not None:
        return torch.frombuffer(memory, dtype=torch.uint8)
    assert isinstance(arena, CudaArena), "other arenas are in host memory"
    return torch.as_tensor(ArenaBytes(arena), device=f"cuda:{arena.device}")
