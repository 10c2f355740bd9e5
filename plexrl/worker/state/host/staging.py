"""Host memory in which slices of an arena are read before they are copied to its device."""

import torch

from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.worker.state.arena_tensors import host_memory, view


class HostStaging:
    """On the CPU it is the arena itself."""

    def __init__(self, arena: WorkerArena) -> None:
        self._arena = arena
        self._staged: dict[StateSlice, torch.Tensor] = {}

    def memory(self, piece: StateSlice) -> memoryview:
        """Memory for a slice's bytes."""
        own = host_memory(self._arena)
        if own is not None:
            return own[piece.arena_offset : piece.arena_offset + piece.nbytes]
        if piece not in self._staged:
            self._staged[piece] = torch.empty(piece.nbytes, dtype=torch.uint8)
        return memoryview(self._staged[piece].numpy().data)

    def copy_in(self) -> None:
        """Copy all slices to the arena, and free their memory."""
        while self._staged:
            piece, staged = self._staged.popitem()
            if piece.nbytes:
                view(self._arena, piece).view(-1).view(torch.uint8).copy_(staged)
