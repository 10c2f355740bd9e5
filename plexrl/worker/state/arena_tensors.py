"""Tensors in an arena: their offsets, and views of them."""

import math

import torch

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.device.cuda.arena import ArenaBytes, CudaArena
from plexrl.statemanager.layout.keys import ARENA_ALIGNMENT, DTYPE_BYTES, StateKey, StateSlice

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


class ArenaLayout:
    """Assigns consecutive offsets in an arena that is allocated later."""

    def __init__(self, start: int = 0) -> None:
        """Offsets begin at `start`."""
        self.slices: list[StateSlice] = []
        self.nbytes = start
        """End of the assigned memory, including `start`."""

    def add(
        self,
        key: StateKey,
        *,
        global_shape: tuple[int, ...],
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: str = "F32",
        reserve: int | None = None,
    ) -> StateSlice:
        """Add a slice. At least `reserve` elements are reserved for it."""
        piece = StateSlice(
            key=key,
            dtype=dtype,
            global_shape=global_shape,
            offset=offset,
            shape=shape,
            arena_offset=self.nbytes,
        )
        self.skip(max(math.prod(shape), reserve or 0), dtype)
        self.slices.append(piece)
        return piece

    def skip(self, elements: int, dtype: str = "F32") -> None:
        """Reserve `elements` without a slice, rounded up to the arena's alignment."""
        nbytes = elements * DTYPE_BYTES[dtype]
        self.nbytes += -(-nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


def view(arena: WorkerArena, piece: StateSlice) -> torch.Tensor:
    """A slice as a tensor that shares the arena's memory."""
    elements = math.prod(piece.shape)
    return span(arena, piece.arena_offset, elements, piece.dtype).view(piece.shape)


def span(arena: WorkerArena, arena_offset: int, elements: int, dtype: str = "F32") -> torch.Tensor:
    """`elements` consecutive elements from `arena_offset` (bytes) on, as a flat tensor."""
    nbytes = elements * DTYPE_BYTES[dtype]
    return whole(arena)[arena_offset : arena_offset + nbytes].view(TORCH_DTYPES[dtype])


def whole(arena: WorkerArena) -> torch.Tensor:
    """The whole arena as bytes, on its device. [nbytes] uint8. Keeps its addresses alive.

    On a GPU, memory must be attached when this is called, because torch queries the driver for its
    device. The tensor stays valid after an offload and the next load.
    """
    if isinstance(arena, CudaArena):
        return torch.as_tensor(ArenaBytes(arena), device=f"cuda:{arena.device}")
    assert isinstance(arena, Arena), "there are two kinds of arenas"
    return torch.frombuffer(arena.buffer, dtype=torch.uint8)
