"""Sizes of segments, and the way from an arena's bytes to addresses in them. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from plexrl.errors import InvalidRequestError

SEGMENT_BYTES_MIN = 256 << 10
SEGMENT_BYTES_MAX = 64 << 20
"""Of segments of a usual arena; larger ones keep `SEGMENTS_MAX`."""
SEGMENTS_MAX = 256
"""About so many descriptors for one arena at most, far below what a process may have open."""


def segment_sizes(nbytes: int) -> tuple[int, ...]:
    """Powers of two that come to at least `nbytes`, largest first, with less than one of the
    smallest to spare. So few sizes are in use that one arena's segments suit the next one."""
    left = max(1, -(-nbytes // SEGMENT_BYTES_MIN)) * SEGMENT_BYTES_MIN
    size = SEGMENT_BYTES_MAX
    while left > size * SEGMENTS_MAX:
        size *= 2
    sizes = []
    while left:
        count, left = divmod(left, size)
        sizes += [size] * count
        size //= 2
    return tuple(sizes)


class AddressTable:
    """Where an arena's bytes lie when its segments are mapped apart."""

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        """`places` are (address, bytes) of each segment, in order."""
        self._places = tuple(places)
        self._ends = tuple(accumulate(nbytes for _, nbytes in self._places))

    @property
    def nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def split(self, offset: int, nbytes: int) -> Iterable[tuple[int, int]]:
        """(address, bytes) of the pieces that [offset, offset + nbytes) of the arena lies in.

        Raises:
            InvalidRequestError: it reaches out of the arena.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise InvalidRequestError(
                f"bytes {offset} to {offset + nbytes} are not in an arena of {self.nbytes}"
            )
        index = bisect_right(self._ends, offset)
        if 0 < nbytes <= self._ends[index] - offset:
            # Nearly every run of a version that has many.
            address, length = self._places[index]
            return ((address + offset - self._ends[index] + length, nbytes),)
        return self._split(index, offset, nbytes)

    def _split(self, index: int, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        while nbytes:
            address, length = self._places[index]
            within = offset - (self._ends[index] - length)
            count = min(nbytes, length - within)
            yield address + within, count
            offset, nbytes, index = offset + count, nbytes - count, index + 1


def uncovered(covered: Sequence[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of what the (offset, bytes) ranges `covered` leave of [0, nbytes)."""
    reached = 0
    for offset, length in sorted(covered):
        if offset > reached:
            yield reached, offset - reached
        reached = max(reached, offset + length)
    if reached < nbytes:
        yield reached, nbytes - reached
