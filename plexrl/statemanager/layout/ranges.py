"""Free byte ranges of several segments, with neighbours merged. Pure."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

PAGE_BYTES = 4096
"""Regions of versions begin at multiples of a page."""


class Piece(NamedTuple):
    """A byte range of one segment."""

    segment: int
    offset: int
    nbytes: int


class FreeRanges:
    """Disjoint free ranges. Neighbours are merged, so freed memory can be taken as one piece."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.nbytes = 0
        """Sum of all ranges."""
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        for piece in pieces:
            self.add(piece)

    def __iter__(self) -> Iterator[Piece]:
        for segment, ranges in sorted(self._ranges.items()):
            yield from (Piece(segment, start, end - start) for start, end in ranges)

    def add(self, piece: Piece) -> None:
        """Add a range. None of its bytes may be free already."""
        if not piece.nbytes:
            return
        ranges = self._ranges.setdefault(piece.segment, [])
        start, end = piece.offset, piece.offset + piece.nbytes
        at = bisect_left(ranges, (start, end))
        assert at == 0 or ranges[at - 1][1] <= start, f"{piece} is free already"
        assert at == len(ranges) or end <= ranges[at][0], f"{piece} is free already"
        if at < len(ranges) and ranges[at][0] == end:
            end = ranges.pop(at)[1]
        if at > 0 and ranges[at - 1][1] == start:
            start = ranges.pop(at - 1)[0]
        insort(ranges, (start, end))
        self.nbytes += piece.nbytes

    def remove(self, piece: Piece) -> None:
        """Remove the free bytes of `piece`."""
        end = piece.offset + piece.nbytes
        kept: list[tuple[int, int]] = []
        for first, last in self._ranges.get(piece.segment, []):
            inner = max(0, min(last, end) - max(first, piece.offset))
            if not inner:
                kept.append((first, last))
                continue
            self.nbytes -= inner
            if first < piece.offset:
                kept.append((first, piece.offset))
            if end < last:
                kept.append((end, last))
        self._ranges[piece.segment] = kept

    def take(self, nbytes: int, preferred: Collection[int] = ()) -> list[Piece]:
        """Remove and return up to `nbytes` bytes, in as few ranges as possible; from the segments
        `preferred` first."""
        found = self._take_from([one for one in self if one.segment in preferred], nbytes)
        others = [one for one in self if one.segment not in preferred]
        return found + self._take_from(others, nbytes - total_bytes(found))

    def _take_from(self, pieces: list[Piece], nbytes: int) -> list[Piece]:
        found: list[Piece] = []
        # Longest first; the last piece comes from the shortest range that suffices.
        pieces.sort(key=lambda piece: (-piece.nbytes, piece))
        for index, piece in enumerate(pieces):
            if nbytes <= 0:
                break
            if piece.nbytes >= nbytes:
                enough = (other for other in reversed(pieces[index:]) if other.nbytes >= nbytes)
                piece = next(enough)._replace(nbytes=nbytes)
            self.remove(piece)
            found.append(piece)
            nbytes -= piece.nbytes
        return found


class FreeMemory:
    """Free ranges of one tenant's segments, or of unassigned ones.

    `warm` ranges have pages; `cold` ranges have none."""

    def __init__(self) -> None:
        self.warm, self.cold = FreeRanges(), FreeRanges()

    @property
    def nbytes(self) -> int:
        """Sum of warm and cold bytes."""
        return self.warm.nbytes + self.cold.nbytes

    def bytes_in(self, segments: Collection[int]) -> int:
        """Sum of warm and cold bytes in some segments."""
        pieces = [*self.warm, *self.cold]
        return sum(piece.nbytes for piece in pieces if piece.segment in segments)


def total_bytes(pieces: Iterable[Piece]) -> int:
    """Sum of the pieces' sizes."""
    return sum(piece.nbytes for piece in pieces)


def chunks(piece: Piece, nbytes_max: int) -> Iterator[Piece]:
    """Split a range into pieces of at most `nbytes_max`."""
    for start in range(0, piece.nbytes, nbytes_max):
        nbytes = min(nbytes_max, piece.nbytes - start)
        yield piece._replace(offset=piece.offset + start, nbytes=nbytes)


def subrange(pieces: Iterable[Piece], start: int, nbytes: int) -> list[Piece]:
    """The parts of `pieces` that hold bytes [start, start + nbytes) of their concatenation."""
    found: list[Piece] = []
    for piece in pieces:
        first, last = max(0, start), min(piece.nbytes, start + nbytes)
        if first < last:
            found.append(Piece(piece.segment, piece.offset + first, last - first))
        start -= piece.nbytes
        if start + nbytes <= 0:
            break
    return found
