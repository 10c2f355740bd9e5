"""Copies of bytes between arena and version file, by descriptor.

The daemon maps no arena: whoever owns one could cut it short, and a mapping of what is no longer
there kills the process that touches it. It copies through a block that stays in the processor's
cache instead, which between two memory files costs what `sendfile` costs, and two thirds of what
copying into a fresh mapping costs, because nothing faults page by page.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.versions import Extent


def page_aligned_block(nbytes: int) -> memoryview:
    """Writable memory that direct I/O accepts; freed with its last reference."""
    return memoryview(mmap.mmap(-1, nbytes))


def gather(
    source_fd: int, extents: Sequence[Extent], nbytes: int, block: memoryview
) -> Iterator[tuple[int, int]]:
    """Bring a version's data into `block`, one block after the other, from where `extents` say.

    Yields (start in the data, bytes in the block); what no extent covers is zero.

    Raises:
        InvalidRequestError: the source ends before an extent does.
    """
    starts = [extent.file_offset for extent in extents]
    for start in range(0, nbytes, len(block)):
        count = min(len(block), nbytes - start)
        pieces = list(_overlaps(extents, starts, start, start + count))
        if sum(length for _, _, length in pieces) < len(block):
            # The block is reused, and bytes of one tenant must not end up in another's file.
            block[:] = bytes(len(block))
        for arena_offset, at, length in pieces:
            _read_exactly(source_fd, block[at : at + length], arena_offset)
        yield start, count


def scatter(
    target_fd: int, extents: Sequence[Extent], starts: Sequence[int], start: int, data: memoryview
) -> None:
    """Write `data`, which begins at `start` in a version's data, to where `extents` say.

    `starts` are the extents' file offsets.
    """
    for arena_offset, at, length in _overlaps(extents, starts, start, start + len(data)):
        write_all(target_fd, data[at : at + length], arena_offset)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write the whole of `data` at `offset`."""
    while len(data) > 0:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _overlaps(
    extents: Sequence[Extent], starts: Sequence[int], start: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """(arena offset, place from `start`, bytes) of every run that [start, end) of the data has."""
    for extent in islice(extents, max(0, bisect_right(starts, start) - 1), None):
        if extent.file_offset >= end:
            return
        first = max(start, extent.file_offset)
        last = min(end, extent.file_offset + extent.nbytes)
        if first < last:
            yield extent.arena_offset + first - extent.file_offset, first - start, last - first


def _read_exactly(fd: int, target: memoryview, offset: int) -> None:
    while len(target) > 0:
        count = os.preadv(fd, [target], offset)
        if count == 0:
            raise InvalidRequestError(f"the arena ends at byte {offset}, inside its own slices")
        target, offset = target[count:], offset + count
