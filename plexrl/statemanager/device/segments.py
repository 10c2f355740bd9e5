"""Segment sizes, and the mapping from arena offsets to segment addresses. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from plexrl.errors import InvalidRequestError

SEGMENT_BYTES_MIN = 256 << 10
SEGMENT_BYTES_MAX = 64 << 20
"""Largest segment of a usual arena; very large arenas use larger ones to respect `SEGMENTS_MAX`."""
SEGMENTS_MAX = 256
"""Approximate bound of descriptors per arena, far below the limit of open files."""


def segment_sizes(nbytes: int) -> tuple[int, ...]:
    """Powers of two, largest first, whose sum exceeds `nbytes` by less than the smallest size. Few
    distinct sizes let one arena reuse the segments of another."""
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


def leading(sizes: Sequence[int], bytes_max: int, bytes_wanted: int) -> tuple[int, ...]:
    """The first segments, of `bytes_max` at most together, as many as `bytes_wanted` need."""
    found: list[int] = []
    total = 0
    for size in sizes:
        if total >= bytes_wanted or total + size > bytes_max:
            break
        found.append(size)
        total += size
    return tuple(found)


class AddressTable:
    """Addresses of an arena's bytes whose segments are mapped separately."""

    def __init__(self, mapped: Sequence[tuple[int, int]]) -> None:
        """`mapped`: (address, bytes) of each segment, in arena order."""
        self._mapped = tuple(mapped)
        self._ends = tuple(accumulate(nbytes for _, nbytes in self._mapped))

    @property
    def nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def split(self, offset: int, nbytes: int) -> Iterable[tuple[int, int]]:
        """(address, bytes) of the pieces that hold [offset, offset + nbytes) of the arena.

        Raises:
            InvalidRequestError: the range reaches out of the arena.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise InvalidRequestError(
                f"bytes {offset} to {offset + nbytes} are not in an arena of {self.nbytes}"
            )
        index = bisect_right(self._ends, offset)
        if 0 < nbytes <= self._ends[index] - offset:
            # The common case for a version with many runs.
            address, length = self._mapped[index]
            return ((address + offset - self._ends[index] + length, nbytes),)
        return self._split(index, offset, nbytes)

    def _split(self, index: int, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        while nbytes:
            address, length = self._mapped[index]
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
