"""Blocks of whole tensors, assembled from the slices of ranks' versions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plexrl.errors import CorruptStateError
from plexrl.statemanager.checkpoint.format.tensors import WholeTensor, range_in_slice
from plexrl.statemanager.layout.boxes import Box, difference, intersection
from plexrl.statemanager.layout.keys import DTYPE_BYTES, StateSlice
from plexrl.statemanager.store.receiving.reader import StateReader


class Assembler:
    """Reads blocks of up to `block_bytes` bytes, in memory of two blocks."""

    def __init__(self, readers: Sequence[StateReader], block_bytes: int) -> None:
        self._readers = readers
        self._scratch = memoryview(bytearray(block_bytes))

    def read(self, tensor: WholeTensor, block: Box, target: memoryview) -> None:
        """Fill `target` with a block; replicas must be equal bit for bit.

        Raises:
            CorruptStateError: bytes are missing, or two replicas differ.
        """
        itemsize = DTYPE_BYTES[tensor.dtype]
        whole = _array(target, itemsize, block.shape)
        missing = [block]
        for piece in tensor.pieces:
            run = range_in_slice(block, piece.box, itemsize)
            if run is None:
                continue
            reader = self._readers[piece.reader]
            if run.box == block and missing == [block]:
                reader.read_data(piece.data_offset + run.start, target)
                missing = []
                continue
            part = self._scratch[: run.box.size * itemsize]
            reader.read_data(piece.data_offset + run.start, part)
            values = _array(part, itemsize, run.box.shape)
            missing = self._take(tensor, block, whole, run.box, values, missing)

    def _take(
        self,
        tensor: WholeTensor,
        block: Box,
        whole: npt.NDArray[Any],
        box: Box,
        values: npt.NDArray[Any],
        missing: Sequence[Box],
    ) -> list[Box]:
        """Copy the missing part from `values`, the elements of `box`, and compare the rest."""
        left: list[Box] = []
        fresh: list[Box] = []
        for hole in missing:
            common = intersection(hole, box)
            if common is None:
                left.append(hole)
                continue
            left += difference(hole, common)
            fresh.append(common)
        replicated = [box]
        for common in fresh:
            _window(whole, block, common)[...] = _window(values, box, common)
            replicated = [rest for part in replicated for rest in _without(part, common)]
        for common in replicated:
            if not np.array_equal(_window(whole, block, common), _window(values, box, common)):
                raise CorruptStateError(
                    f"two ranks hold different values of {tensor.key.name} at {list(common.offset)}"
                    ": the deployment's state is inconsistent; load an earlier checkpoint",
                    key=tensor.key.name,
                )
        return left


def copy_common(want: StateSlice, memory: memoryview, block: Box, data: memoryview) -> None:
    """Copy the part of a wanted slice that lies in a block with the bytes `data` into `memory`."""
    held = Box(offset=want.offset, shape=want.shape)
    common = intersection(block, held)
    if common is None:
        return
    itemsize = DTYPE_BYTES[want.dtype]
    target = _array(memory, itemsize, want.shape)
    _window(target, held, common)[...] = _window(_array(data, itemsize, block.shape), block, common)


def _array(memory: memoryview, itemsize: int, shape: Sequence[int]) -> npt.NDArray[Any]:
    # Elements are only moved, so an unsigned integer of their size stands for any dtype.
    return np.frombuffer(memory, dtype=f"u{itemsize}").reshape(shape)


def _window(array: npt.NDArray[Any], origin: Box, box: Box) -> npt.NDArray[Any]:
    window: list[Any] = [
        slice(start - base, start - base + extent)
        for start, base, extent in zip(box.offset, origin.offset, box.shape, strict=True)
    ]
    # Without the ellipsis, an array of no dimensions would give a value, not a view.
    return array[(..., *window)]


def _without(part: Box, inner: Box) -> list[Box]:
    common = intersection(part, inner)
    return [part] if common is None else difference(part, common)
