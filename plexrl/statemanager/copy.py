"""Copies between mapped slices, by box."""

from typing import Any

import numpy as np
import numpy.typing as npt

from plexrl.statemanager.boxes import Transfer
from plexrl.statemanager.keys import DTYPE_BYTES, StateSlice

Bytes = npt.NDArray[np.uint8]


def copy_box(transfer: Transfer, source: Bytes, target: Bytes) -> None:
    """Copy one box between two row-major slices; each memory is what its slice's offset is in."""
    box = transfer.box
    views = []
    for piece, memory in ((transfer.source, source), (transfer.target, target)):
        window = tuple(
            slice(start - origin, start - origin + extent)
            for start, origin, extent in zip(box.offset, piece.offset, box.shape, strict=True)
        )
        whole = _array(piece, memory)
        # Indexed by (), an array of no dimensions would become a value, not a view.
        views.append(whole[window] if window else whole)
    np.copyto(views[1], views[0])


def _array(piece: StateSlice, memory: Bytes) -> npt.NDArray[Any]:
    flat = memory[piece.arena_offset : piece.arena_offset + piece.nbytes]
    # Elements are only moved, so an unsigned integer of their size stands for any dtype.
    return flat.view(f"u{DTYPE_BYTES[piece.dtype]}").reshape(piece.shape)
