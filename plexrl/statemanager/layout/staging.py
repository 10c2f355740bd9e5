"""Copies grouped by destination block, for a target that needs few long writes. Pure.

A device behind a bus is such a target. The copies of one block are gathered in a staging buffer,
whatever their sources, and then written to the device at once.
"""

from dataclasses import replace

import numpy as np

from plexrl.statemanager.layout.plan.columns import ITEM_BYTES, Ints
from plexrl.statemanager.layout.strided.copies import BYTES_CAST, StridedCopies, concatenate


class StagingBlocks:
    """Copies in order of the block that they begin in; built once, read block by block."""

    def __init__(self, copies: StridedCopies, block_bytes: int) -> None:
        """`block_bytes` is a power of two of at least 4096, so that no element spans two blocks."""
        assert block_bytes >= 4096
        assert not block_bytes & (block_bytes - 1)
        self._block_bytes = block_bytes
        order = np.argsort(copies.dst_offsets, kind="stable")
        self._copies = copies.chosen(order)
        self._row_bytes = self._copies.row_bytes()
        ends = (self._copies.counts - 1) * self._copies.dst_strides + self._row_bytes
        self._ends: Ints = self._copies.dst_offsets + ends

    def starts(self) -> list[int]:
        """The start offsets of the blocks that some copy writes to, ascending."""
        first = self._copies.dst_offsets // self._block_bytes
        last = (self._ends - 1) // self._block_bytes
        found: set[int] = set()
        for low, high in zip(first.tolist(), last.tolist(), strict=True):
            found.update(range(low, high + 1))
        return [index * self._block_bytes for index in sorted(found)]

    def copies(self, block: int) -> StridedCopies:
        """The copies into the block at offset `block`; their offsets count from its start."""
        end = block + self._block_bytes
        behind = int(np.searchsorted(self._copies.dst_offsets, end))
        touching = np.flatnonzero(self._ends[:behind] > block)
        mine = self._copies.chosen(touching)
        row_bytes = self._row_bytes[touching]
        # A copy of one row has no stride; any stride that is long enough works.
        steps = np.maximum(mine.dst_strides, row_bytes)
        first = np.clip(-((mine.dst_offsets - block) // steps), 0, mine.counts)
        behind_rows = (end - mine.dst_offsets - row_bytes) // steps + 1
        last = np.maximum(first, np.clip(behind_rows, 0, mine.counts))
        whole = replace(
            mine,
            src_offsets=mine.src_offsets + first * mine.src_strides,
            dst_offsets=mine.dst_offsets + first * mine.dst_strides,
            counts=last - first,
        ).chosen(last > first)
        # The row that begins before the block, and the row that ends after it.
        before = np.flatnonzero(first > 0)
        after = np.flatnonzero(last < mine.counts)
        found = concatenate(
            [
                whole,
                _part(mine, before, first[before] - 1, block, end),
                _part(mine, after, last[after], block, end),
            ]
        )
        return replace(found, dst_offsets=found.dst_offsets - block)


def covered(copies: StridedCopies) -> list[tuple[int, int]]:
    """(start, bytes) of the destination ranges that the copies fill, ascending and joined."""
    row_bytes = copies.row_bytes()
    is_dense = (copies.counts == 1) | (copies.dst_strides == row_bytes)
    dense = np.flatnonzero(is_dense)
    loose = np.flatnonzero(~is_dense)
    row = np.repeat(loose, copies.counts[loose])
    sizes = copies.counts[loose]
    index = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    starts = np.concatenate(
        [copies.dst_offsets[dense], copies.dst_offsets[row] + index * copies.dst_strides[row]]
    )
    lengths = np.concatenate([row_bytes[dense] * copies.counts[dense], row_bytes[row]])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + lengths)[order]
    if not len(starts):
        return []
    begins = np.flatnonzero(np.append(True, starts[1:] != ends[:-1]))
    lasts = np.append(begins[1:] - 1, len(starts) - 1)
    return list(zip(starts[begins].tolist(), (ends[lasts] - starts[begins]).tolist(), strict=True))


def _part(copies: StridedCopies, chosen: Ints, rows: Ints, block: int, end: int) -> StridedCopies:
    """The part between `block` and `end` of one row of each chosen copy."""
    mine = copies.chosen(chosen)
    is_cast = mine.casts != BYTES_CAST
    codes = np.where(is_cast, mine.casts, 0)
    held = np.where(is_cast, ITEM_BYTES[codes // len(ITEM_BYTES)], 1)
    wanted = np.where(is_cast, ITEM_BYTES[codes % len(ITEM_BYTES)], 1)
    starts = mine.dst_offsets + rows * mine.dst_strides
    begin = np.maximum(starts, block)
    stop = np.minimum(starts + mine.items * wanted, end)
    skipped = (begin - starts) // wanted
    zeros = np.zeros_like(begin)
    found = replace(
        mine,
        src_offsets=mine.src_offsets + rows * mine.src_strides + skipped * held,
        dst_offsets=begin,
        items=(stop - begin) // wanted,
        counts=zeros + 1,
        src_strides=zeros,
        dst_strides=zeros,
    )
    return found.chosen(stop > begin)
