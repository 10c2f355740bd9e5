"""Whole tensors assembled from ranks' slices, and the blocks in which they are read. Pure.

A block is a box that is contiguous in the row-major tensor: one index in each of the first
dimensions, a range in the next, and all of the rest. So its part in a rank's slice is contiguous in
that slice.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plexrl.errors import StateLostError
from plexrl.statemanager.layout.boxes import Box, difference, intersection
from plexrl.statemanager.layout.keys import DTYPE_BYTES, StateKey, StateSlice

TENSOR_BLOCK_BYTES = 1 << 20
"""Size of a checksummed block. A slice of another layout reads up to this much too much at either
end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBox:
    """A box of a tensor, and its offset in the data of one version."""

    reader: int
    """Index of the version's reader."""
    box: Box
    data_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensor:
    """A tensor, covered by the boxes of its replicas and shards, which may overlap."""

    key: StateKey
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[HeldBox, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRange:
    """The contiguous part of a slice that lies in a block."""

    box: Box
    """The box of the part, in the tensor's coordinates."""
    start: int
    """Offset in the slice, in bytes."""


def merge(shards: Sequence[Sequence[StateSlice]]) -> tuple[WholeTensor, ...]:
    """Every tensor of a deployment, in the order of their first slices.

    `arena_offset` of a slice is the offset in its version's data. Replicas are kept, so that the
    reader can compare them.

    Raises:
        StateLostError: shards disagree about a tensor's shape or dtype, or do not cover it.
    """
    slices: dict[StateKey, list[tuple[int, StateSlice]]] = {}
    for index, shard in enumerate(shards):
        for piece in shard:
            slices.setdefault(piece.key, []).append((index, piece))
    return tuple(_whole(key, found) for key, found in slices.items())


def blocks(
    shape: Sequence[int], itemsize: int, block_bytes: int = TENSOR_BLOCK_BYTES
) -> Iterator[Box]:
    """Split a tensor into blocks of at most `block_bytes`, in row-major order."""
    if 0 in shape:
        return
    fitting = max(1, block_bytes // itemsize)
    # The first dimension whose rows fit a block is split into ranges, earlier ones into indices.
    cut = 0
    while cut < len(shape) - 1 and math.prod(shape[cut + 1 :]) > fitting:
        cut += 1
    if not shape:
        yield Box(offset=(), shape=())
        return
    rows = max(1, fitting // math.prod(shape[cut + 1 :]))
    rest = tuple(shape[cut + 1 :])
    for outer in _indices(shape[:cut]):
        for start in range(0, shape[cut], rows):
            yield Box(
                offset=(*outer, start, *(0 for _ in rest)),
                shape=(*(1 for _ in outer), min(rows, shape[cut] - start), *rest),
            )


def block_start(block: Box, shape: Sequence[int]) -> int:
    """Number of elements before the block."""
    start = 0
    for index, extent in zip(block.offset, shape, strict=True):
        start = start * extent + index
    return start


def range_in_slice(block: Box, held: Box, itemsize: int) -> SliceRange | None:
    """The part of a slice with the box `held` that lies in `block`; None if there is none."""
    common = intersection(block, held)
    if common is None:
        return None
    inside = Box(
        offset=tuple(a - b for a, b in zip(common.offset, held.offset, strict=True)),
        shape=common.shape,
    )
    return SliceRange(box=common, start=block_start(inside, held.shape) * itemsize)


def _whole(key: StateKey, found: Sequence[tuple[int, StateSlice]]) -> WholeTensor:
    first = found[0][1]
    missing = [] if 0 in first.global_shape else [_all_of(first)]
    pieces = []
    for index, piece in found:
        if (piece.dtype, piece.global_shape) != (first.dtype, first.global_shape):
            raise StateLostError(
                f"{key.name} is {first.dtype}{list(first.global_shape)} on one rank and "
                f"{piece.dtype}{list(piece.global_shape)} on another: the ranks' versions are not "
                "of one model; save them again",
                key=key.name,
            )
        box = Box(offset=piece.offset, shape=piece.shape)
        if 0 in piece.shape:
            continue
        pieces.append(HeldBox(reader=index, box=box, data_offset=piece.arena_offset))
        left: list[Box] = []
        for part in missing:
            common = intersection(part, box)
            left += [part] if common is None else difference(part, common)
        missing = left
    if missing:
        raise StateLostError(
            f"the versions do not cover {key.name}: {sum(box.size for box in missing)} elements "
            "are missing; save every rank's version",
            key=key.name,
        )
    return WholeTensor(key=key, dtype=first.dtype, shape=first.global_shape, pieces=tuple(pieces))


def _all_of(piece: StateSlice) -> Box:
    return Box(offset=(0,) * len(piece.global_shape), shape=piece.global_shape)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)
