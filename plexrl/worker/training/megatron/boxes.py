"""Boxes of Hugging Face parameters within a parameter of Megatron's. Pure.

Megatron fuses and interleaves what Hugging Face keeps apart, and its distributed optimizer cuts the
result anywhere. Whatever comes of that, in local memory it is a row of boxes of the whole tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a Hugging Face parameter that lies row-major in a local one."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """First index of the box in every dimension of the global tensor."""
    shape: tuple[int, ...]
    start: int
    """Elements of the local parameter before it."""

    @property
    def elements(self) -> int:
        """In the box."""
        return math.prod(self.shape)


def cut(pieces: Sequence[Piece], first: int, last: int) -> list[Piece]:
    """What elements `first` to `last` of the local parameter hold, as the fewest boxes in order.

    Their `start` counts from the beginning of the local parameter still.
    """
    found: list[Piece] = []
    for piece in pieces:
        begin = max(first - piece.start, 0)
        end = min(last - piece.start, piece.elements)
        for offset, shape, start in _boxes(piece.shape, begin, end):
            moved = tuple(a + b for a, b in zip(piece.offset, offset, strict=True))
            found.append(replace(piece, offset=moved, shape=shape, start=piece.start + start))
    return found


def _boxes(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(offset, shape, elements before it) of every box in a flat range of a tensor."""
    if first >= last:
        return
    if len(shape) == 1:
        yield (first,), (last - first,), first
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row
    if begin > end:
        yield from _of_row(shape, end, first, last)
        return
    yield from _of_row(shape, begin - 1, first, begin * row)
    if begin < end:
        rest = (0,) * (len(shape) - 1)
        yield (begin, *rest), (end - begin, *shape[1:]), begin * row
    yield from _of_row(shape, end, end * row, last)


def _of_row(
    shape: tuple[int, ...], index: int, first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    before = index * math.prod(shape[1:])
    for offset, box, start in _boxes(shape[1:], first - before, last - before):
        yield (index, *offset), (1, *box), before + start
