"""Whole tensors made of the slices that ranks hold, and the blocks they are read in. Pure.

A block is a box of a tensor that lies in one piece in the row-major tensor. The part of a block
that a rank's slice has then lies in one piece in that slice too: a block is one index in each of
the first dimensions, a range in the next, and everything behind it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plexrl.errors import StateLostError
from plexrl.statemanager.layout.boxes import Box, difference, intersection
from plexrl.statemanager.layout.keys import DTYPE_BYTES, StateKey, StateSlice

BLOCK_BYTES = 1 << 20
"""Of a checkpoint's digests, and of its reads: a slice of another layout reads this much too much
at either end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor, and where its bytes begin in the data of one version."""

    reader: int
    """Index of the version."""
    box: Box
    data_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensor:
    """A tensor that the pieces cover, some of it perhaps more than once."""

    key: StateKey
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes that lie in one piece in a block's own part of a slice."""

    box: Box
    """What of the tensor they are."""
    start: int
    """Bytes into the slice."""


def merge(shards: Sequence[Sequence[StateSlice]]) -> tuple[WholeTensor, ...]:
    """Every tensor of a deployment, in the order of the first shard that has a part of it.

    `arena_offset` of the slices counts in the data of their version. A slice that another one has
    already (a replica) becomes a piece too, to be compared with it.

    Raises:
        StateLostError: two shards differ about a tensor, or together do not have all of it.
    """
    slices: dict[StateKey, list[tuple[int, StateSlice]]] = {}
    for index, shard in enumerate(shards):
        for piece in shard:
            slices.setdefault(piece.key, []).append((index, piece))
    return tuple(_whole(key, found) for key, found in slices.items())


def blocks(shape: Sequence[int], itemsize: int, block_bytes: int = BLOCK_BYTES) -> Iterator[Box]:
    """The tensor as blocks of at most `block_bytes`, in row-major order; none if it is empty."""
    if 0 in shape:
        return
    fitting = max(1, block_bytes // itemsize)
    # The first dimension whose rows fit a block is cut into ranges; those before it, into indices.
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
    """Elements of the tensor in front of the block."""
    start = 0
    for index, extent in zip(block.offset, shape, strict=True):
        start = start * extent + index
    return start


def run_of(block: Box, held: Box, itemsize: int) -> Run | None:
    """The part of a block that a slice with the box `held` has; None where it has nothing."""
    common = intersection(block, held)
    if common is None:
        return None
    inside = Box(
        offset=tuple(a - b for a, b in zip(common.offset, held.offset, strict=True)),
        shape=common.shape,
    )
    return Run(box=common, start=block_start(inside, held.shape) * itemsize)


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
        pieces.append(Piece(reader=index, box=box, data_offset=piece.arena_offset))
        left: list[Box] = []
        for part in missing:
            common = intersection(part, box)
            left += [part] if common is None else difference(part, common)
        missing = left
    if missing:
        raise StateLostError(
            f"no version has all of {key.name}: {sum(box.size for box in missing)} elements are "
            "missing; save every rank's version",
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
