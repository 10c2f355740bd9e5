"""Offsets of the parameters in the flat buffer that ZeRO cuts into equal partitions. Pure.

DeepSpeed packs parameters end to end and cuts where a partition is full. So a partition may begin
in the middle of a row, at an unaligned address. This module inserts gaps between parameters so that

- every parameter and every partition begins at a multiple of `GRAIN` elements;
- every cut through a parameter is between two of its rows.

A rank's part of a parameter is then one box of the Hugging Face tensor, at an address that the
StateManager accepts. To DeepSpeed, a gap is a parameter that never gets a gradient.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plexrl.worker.state.arena_tensors import ParameterPiece

GRAIN = 16
"""Elements; as float32 these are `ARENA_ALIGNMENT` bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitions:
    """A flat buffer of `count` partitions of `size` elements each."""

    shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]
    """Offset of every parameter in the flat buffer, in elements, ascending."""
    size: int
    count: int

    def gaps(self) -> Iterator[tuple[str | None, int]]:
        """(parameter, elements of the gap before it) for every gap; None for the gap at the end."""
        end = 0
        for name, start in self.starts.items():
            if start > end:
                yield name, start - end
            end = start + math.prod(self.shapes[name])
        if end < self.size * self.count:
            yield None, self.size * self.count - end

    def boxes(self, index: int) -> list[ParameterPiece]:
        """The boxes in partition `index`, in order: whole rows."""
        begin, end = self.size * index, self.size * (index + 1)
        found = []
        for name, start in self.starts.items():
            shape = self.shapes[name]
            first, last = max(begin, start), min(end, start + math.prod(shape))
            if first >= last:
                continue
            row = _row(shape)
            rows = ((first - start) // row, (last - start) // row)
            found.append(
                ParameterPiece(
                    name=name,
                    global_shape=shape,
                    offset=(rows[0], *(0 for _ in shape[1:])) if shape else (),
                    shape=(rows[1] - rows[0], *shape[1:]) if shape else (),
                    start=first - begin,
                )
            )
        return found


def partition(shapes: Mapping[str, tuple[int, ...]], count: int) -> Partitions:
    """Small partitions; they exceed an equal share by a few rows of padding."""
    total = sum(_up(math.prod(shape), GRAIN) for shape in shapes.values())
    size = max(GRAIN, _up(-(-total // count), GRAIN))
    while True:
        # A parameter that is cut twice fills whole partitions between the cuts.
        long = [_row(shape) for shape in shapes.values() if math.prod(shape) > size]
        size = _up(size, math.lcm(GRAIN, *long))
        starts, end = _laid_out(shapes, size)
        if end <= size * count:
            return Partitions(shapes=dict(shapes), starts=starts, size=size, count=count)
        size += _up(-(-(end - size * count) // count), GRAIN)


def _laid_out(shapes: Mapping[str, tuple[int, ...]], size: int) -> tuple[dict[str, int], int]:
    starts: dict[str, int] = {}
    end = 0
    for name, shape in shapes.items():
        start, elements = _up(end, GRAIN), math.prod(shape)
        cut = _up(start, size)
        if start < cut < start + elements:
            start = cut - _down(cut - start, math.lcm(GRAIN, _row(shape)))
        starts[name] = start
        end = start + elements
    return starts, end


def _row(shape: Sequence[int]) -> int:
    return max(1, math.prod(shape[1:]))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _down(value: int, multiple: int) -> int:
    return value // multiple * multiple
