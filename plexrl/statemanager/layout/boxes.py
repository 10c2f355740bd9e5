"""Boxes of a tensor's index space. Pure."""

import math
from dataclasses import dataclass

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """`shape` elements from `offset` on, in every dimension."""

    offset: Index
    shape: Index

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def intersection(a: Box, b: Box) -> Box | None:
    """The common part of two boxes; None if they do not overlap."""
    start = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    ends = [
        min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    ]
    shape = tuple(end - at for at, end in zip(start, ends, strict=True))
    return None if any(extent <= 0 for extent in shape) else Box(offset=start, shape=shape)


def difference(a: Box, inner: Box) -> list[Box]:
    """`a` without `inner`, a box inside it, as disjoint boxes."""
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


def _with(offset: list[int], shape: list[int], dim: int, start: int, extent: int) -> Box:
    new_offset, new_shape = list(offset), list(shape)
    new_offset[dim], new_shape[dim] = start, extent
    return Box(offset=tuple(new_offset), shape=tuple(new_shape))
