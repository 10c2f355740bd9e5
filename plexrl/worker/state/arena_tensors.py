"""Tensors that live in an arena: where each lies, and views of them."""

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
    """Hands out places in an arena that is yet to be made, one after the other."""

    def __init__(self, start: int = 0) -> None:
        """Places count on from `start`."""
        self.slices: list[StateSlice] = []
        self.nbytes = start
        """Up to the end of what was handed out, `start` included."""

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
        """The place of one slice; `reserve` elements are kept free for it where that is more."""
        piece = StateSlice(
            key=key,
            dtype=dtype,
            global_shape=global_shape,
            offset=offset,
            shape=shape,
            arena_offset=self.nbytes,
        )
        self.leave(max(math.prod(shape), reserve or 0), dtype)
        self.slices.append(piece)
        return piece

    def leave(self, elements: int, dtype: str = "F32") -> None:
        """Have nothing lie in so many elements."""
        nbytes = elements * DTYPE_BYTES[dtype]
        self.nbytes += -(-nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


def view(arena: WorkerArena, piece: StateSlice) -> torch.Tensor:
    """The slice as a tensor that shares the arena's memory."""
    elements = math.prod(piece.shape)
    return span(arena, piece.arena_offset, elements, piece.dtype).view(piece.shape)


def span(arena: WorkerArena, arena_offset: int, elements: int, dtype: str = "F32") -> torch.Tensor:
    """`elements` in a row from `arena_offset` (bytes) on, as a flat tensor on the arena."""
    nbytes = elements * DTYPE_BYTES[dtype]
    return whole(arena)[arena_offset : arena_offset + nbytes].view(TORCH_DTYPES[dtype])


def whole(arena: WorkerArena) -> torch.Tensor:
    """The arena as bytes, on its device, and keeping its addresses alive. [nbytes] uint8.

    On a GPU memory must be attached when this is called, because torch asks the driver whose it is;
    the tensor stays valid over an offload and the next load.
    """
    if isinstance(arena, CudaArena):
        return torch.as_tensor(ArenaBytes(arena), device=f"cuda:{arena.device}")
    assert isinstance(arena, Arena), "there are two kinds"
    return torch.frombuffer(arena.buffer, dtype=torch.uint8)
