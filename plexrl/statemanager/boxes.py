"""Boxes of a tensor's index space: which rank holds what, and which bytes go where. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.errors import StateLostError
from plexrl.statemanager.keys import StateSlice

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """`shape` elements from `offset` on, in every dimension."""

    offset: Index
    shape: Index

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One box to copy from a shard's slice into a wanted slice."""

    shard: int
    """Index of the shard in the plan's input."""
    source: StateSlice
    target: StateSlice
    box: Box
    """In the global tensor's coordinates."""

    @property
    def nbytes(self) -> int:
        return self.box.size * (self.target.nbytes // max(1, math.prod(self.target.shape)))


def intersection(a: Box, b: Box) -> Box | None:
    """What both cover; None where that is nothing."""
    start = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    ends = [
        min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    ]
    shape = tuple(end - at for at, end in zip(start, ends, strict=True))
    return None if any(extent <= 0 for extent in shape) else Box(offset=start, shape=shape)


def difference(a: Box, inner: Box) -> list[Box]:
    """`a` without `inner` (a box inside it), as disjoint boxes."""
    rest: list[Box] = []
    offset, shape = list(a.offset), list(a.shape)
    for dim in range(len(shape)):
        before = inner.offset[dim] - offset[dim]
        after = offset[dim] + shape[dim] - (inner.offset[dim] + inner.shape[dim])
        if before > 0:
            rest.append(_with(offset, shape, dim, offset[dim], before))
        if after > 0:
            end = inner.offset[dim] + inner.shape[dim]
            rest.append(_with(offset, shape, dim, end, after))
        offset[dim], shape[dim] = inner.offset[dim], inner.shape[dim]
    return rest


def plan_pull(
    wants: Sequence[StateSlice], shards: Sequence[Sequence[StateSlice]]
) -> list[Transfer]:
    """Transfers that fill every wanted slice exactly once (redundancy 1.0) from `shards`.

    Replicas among the shards are used once: the first that covers a piece gives it.

    Raises:
        StateLostError: some piece of a wanted slice is in no shard, or has another dtype there.
    """
    by_key: dict[object, list[tuple[int, StateSlice]]] = {}
    for index, shard in enumerate(shards):
        for piece in shard:
            by_key.setdefault(piece.key, []).append((index, piece))
    transfers: list[Transfer] = []
    for want in wants:
        missing = [Box(offset=want.offset, shape=want.shape)] if math.prod(want.shape) else []
        for index, piece in by_key.get(want.key, []):
            if piece.dtype != want.dtype or piece.global_shape != want.global_shape:
                raise StateLostError(
                    f"{want.key.name} is published as {piece.dtype}{list(piece.global_shape)} and "
                    f"wanted as {want.dtype}{list(want.global_shape)}: use the same model for both",
                    key=want.key.name,
                )
            held = Box(offset=piece.offset, shape=piece.shape)
            left: list[Box] = []
            for box in missing:
                common = intersection(box, held)
                if common is None:
                    left.append(box)
                    continue
                transfers.append(Transfer(shard=index, source=piece, target=want, box=common))
                left += difference(box, common)
            missing = left
        if missing:
            raise StateLostError(
                f"no shard holds all of {want.key.name}: {sum(box.size for box in missing)} "
                "elements are missing; publish the weights again",
                key=want.key.name,
            )
    return transfers


def _with(offset: list[int], shape: list[int], dim: int, start: int, extent: int) -> Box:
    new_offset, new_shape = list(offset), list(shape)
    new_offset[dim], new_shape[dim] = start, extent
    return Box(offset=tuple(new_offset), shape=tuple(new_shape))
