"""Strided copies between two memories, as numpy columns. Pure.

One copy moves `count` rows of `items` items each, with one stride at the source and one at the
destination. A contiguous range is a copy of one row. An item is one byte, or one element if the
copy casts its dtype. So a tensor-parallel shard of a matrix is one copy, and a request for a whole
model is short.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from plexrl.statemanager.layout.plan.columns import DTYPES, ITEM_BYTES, Ints

BYTES_CAST = -1
"""The cast code of a copy that does not change its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StridedCopies:
    """Copies in columns of equal length, one row each. Immutable."""

    src_offsets: Ints
    """Offset of the first row in the source memory, in bytes."""
    dst_offsets: Ints
    """Offset of the first row in the destination memory, in bytes."""
    items: Ints
    """Items in one row."""
    counts: Ints
    """Number of rows."""
    src_strides: Ints
    """Bytes from row to row at the source; 0 for a single row."""
    dst_strides: Ints
    casts: Ints
    """`BYTES_CAST`, or source dtype code * len(DTYPES) + destination dtype code."""

    def __len__(self) -> int:
        return len(self.src_offsets)

    @property
    def nbytes(self) -> int:
        """Bytes written at the destination."""
        return int(self.row_bytes().dot(self.counts))

    def row_bytes(self) -> Ints:
        """[copy] bytes of one row at the destination."""
        return self.items * _item_bytes(self.casts)[1]

    def row_bytes_at_source(self) -> Ints:
        """[copy] bytes of one row at the source."""
        return self.items * _item_bytes(self.casts)[0]

    def chosen(self, rows: object) -> "StridedCopies":
        """The copies that `rows`, a numpy index, selects."""
        return StridedCopies(
            **{field.name: getattr(self, field.name)[rows] for field in fields(self)}
        )

    def moved(self, distance: int) -> "StridedCopies":
        """The same copies, read from offsets that are `distance` bytes larger."""
        return replace(self, src_offsets=self.src_offsets + distance)

    def written_at(self, distance: int) -> "StridedCopies":
        """The same copies, written to offsets that are `distance` bytes larger."""
        return replace(self, dst_offsets=self.dst_offsets + distance)

    def batches(self, nbytes_max: int) -> Iterator["StridedCopies"]:
        """The same copies in order, in batches of at most `nbytes_max` bytes. A larger item makes a
        batch of its own."""
        return _batches(self, nbytes_max)


NO_COPIES = StridedCopies(
    **{field.name: np.zeros(0, dtype=np.int64) for field in fields(StridedCopies)}
)


def concatenate(parts: list[StridedCopies]) -> StridedCopies:
    """The copies of all `parts`, in order."""
    return StridedCopies(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in [NO_COPIES, *parts]])
            for field in fields(StridedCopies)
        }
    )


def one_range(start: int, nbytes: int) -> StridedCopies:
    """A copy of `nbytes` bytes from offset `start` to the start of the destination."""
    one, zero = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return StridedCopies(
        src_offsets=one * start,
        dst_offsets=zero,
        items=one * nbytes,
        counts=one,
        src_strides=zero,
        dst_strides=zero,
        casts=one * BYTES_CAST,
    )


def cast_names(code: int) -> tuple[str, str]:
    """(source, destination) dtype of a cast code other than `BYTES_CAST`."""
    return DTYPES[code // len(DTYPES)], DTYPES[code % len(DTYPES)]


def copies_of_boxes(
    shapes: Ints,
    strides: Ints,
    dst_strides: Ints,
    places: Ints,
    targets: Ints,
    dtypes: tuple[Ints, Ints],
) -> tuple[StridedCopies, Ints]:
    """Copies of boxes, and for each copy the index of its box.

    `shapes` are [box, dim], `places` and `targets` the byte offsets [box] of the first elements.
    Strides are [box, dim] in elements; `dtypes` are codes at source and destination.
    """
    boxes, dims = shapes.shape
    items, counts = np.ones(boxes, dtype=np.int64), np.ones(boxes, dtype=np.int64)
    step, target_step = np.zeros(boxes, dtype=np.int64), np.zeros(boxes, dtype=np.int64)
    outer = np.ones_like(shapes)
    for dim in reversed(range(dims)):
        extent, at_source, at_target = shapes[:, dim], strides[:, dim], dst_strides[:, dim]
        is_long = extent > 1
        dense = is_long & (counts == 1) & (at_source == items) & (at_target == items)
        first = is_long & (counts == 1) & ~dense
        regular = is_long & (counts > 1)
        regular &= (at_source == step * counts) & (at_target == target_step * counts)
        items = np.where(dense, items * extent, items)
        step = np.where(first, at_source, step)
        target_step = np.where(first, at_target, target_step)
        rest = is_long & (counts > 1) & ~regular
        counts = np.where(first | regular, counts * extent, counts)
        outer[:, dim] = np.where(rest, extent, 1)
    from_bytes, to_bytes = ITEM_BYTES[dtypes[0]], ITEM_BYTES[dtypes[1]]
    casts = np.where(dtypes[0] == dtypes[1], BYTES_CAST, dtypes[0] * len(DTYPES) + dtypes[1])
    repeats = outer.prod(axis=1)
    box = np.repeat(np.arange(boxes), repeats)
    at, to = places[box], targets[box]
    left = np.arange(len(box)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    for dim in reversed(range(dims)):
        index, left = left % outer[box, dim], left // outer[box, dim]
        at = at + index * strides[box, dim] * from_bytes[box]
        to = to + index * dst_strides[box, dim] * to_bytes[box]
    items = np.where(casts == BYTES_CAST, items * to_bytes, items)
    copies = StridedCopies(
        src_offsets=at,
        dst_offsets=to,
        items=items[box],
        counts=counts[box],
        src_strides=(step * from_bytes)[box],
        dst_strides=(target_step * to_bytes)[box],
        casts=casts[box],
    )
    return copies, box


def coalesce(copies: StridedCopies, groups: Ints) -> tuple[StridedCopies, Ints]:
    """The same bytes with adjacent copies joined, and the group of each copy.

    Copies join only if both have one row, and their groups and casts are equal.
    """
    if len(copies) < 2:
        return copies, groups
    alone = copies.counts == 1
    joins = alone[1:] & alone[:-1]
    joins &= (groups[1:] == groups[:-1]) & (copies.casts[1:] == copies.casts[:-1])
    joins &= copies.src_offsets[1:] == (copies.src_offsets + copies.row_bytes_at_source())[:-1]
    joins &= copies.dst_offsets[1:] == (copies.dst_offsets + copies.row_bytes())[:-1]
    first = np.flatnonzero(np.append(True, ~joins))
    items = np.add.reduceat(copies.items, first)
    return replace(copies.chosen(first), items=items), groups[first]


def single_rows(copies: StridedCopies) -> StridedCopies:
    """The same bytes, with one copy for each row."""
    run = np.repeat(np.arange(len(copies)), copies.counts)
    row = np.arange(len(run)) - np.repeat(np.cumsum(copies.counts) - copies.counts, copies.counts)
    ones = np.ones(len(run), dtype=np.int64)
    return StridedCopies(
        src_offsets=copies.src_offsets[run] + row * copies.src_strides[run],
        dst_offsets=copies.dst_offsets[run] + row * copies.dst_strides[run],
        items=copies.items[run],
        counts=ones,
        src_strides=ones * 0,
        dst_strides=ones * 0,
        casts=copies.casts[run],
    )


def pack(copies: StridedCopies) -> StridedCopies:
    """The same reads, written to consecutive offsets without gaps, as they travel on a stream."""
    row_bytes = copies.row_bytes()
    sizes = row_bytes * copies.counts
    return replace(copies, dst_offsets=np.cumsum(sizes) - sizes, dst_strides=row_bytes)


def unpack(copies: StridedCopies) -> StridedCopies:
    """Copies from the packed stream to their destination offsets; the inverse of `pack`."""
    row_bytes = copies.row_bytes()
    sizes = row_bytes * copies.counts
    return replace(
        copies,
        src_offsets=np.cumsum(sizes) - sizes,
        items=row_bytes,
        src_strides=row_bytes,
        casts=np.full(len(copies), BYTES_CAST),
    )


def reverse_copies(copies: StridedCopies) -> StridedCopies:
    """Copies from destination to source offsets, without a cast: they read a target's own bytes."""
    return replace(
        copies,
        src_offsets=copies.dst_offsets,
        dst_offsets=copies.src_offsets,
        items=copies.row_bytes(),
        src_strides=copies.dst_strides,
        dst_strides=copies.src_strides,
        casts=np.full(len(copies), BYTES_CAST),
    )


def cut_at(copies: StridedCopies, edges: Ints) -> tuple[StridedCopies, Ints]:
    """The same bytes, cut so that no copy crosses one of the `edges` at the source, and for each
    copy the index of the edge before it. The first edge is at or before every copy."""
    ends = (
        copies.src_offsets + (copies.counts - 1) * copies.src_strides + copies.row_bytes_at_source()
    )
    homes = np.searchsorted(edges, copies.src_offsets, "right") - 1
    limits = np.append(edges[1:], np.iinfo(np.int64).max)
    crosses = ends > limits[homes]
    if not crosses.any():
        return copies, homes
    parts: list[StridedCopies] = [copies.chosen(~crosses)]
    rows = single_rows(copies.chosen(crosses))
    while len(rows):
        item_bytes, target_item_bytes = _item_bytes(rows.casts)
        limit = limits[np.searchsorted(edges, rows.src_offsets, "right") - 1]
        fits = np.minimum(rows.items, (limit - rows.src_offsets) // item_bytes)
        assert fits.all(), "edges are page boundaries, which no element crosses"
        parts.append(replace(rows, items=fits))
        rest = replace(
            rows,
            src_offsets=rows.src_offsets + fits * item_bytes,
            dst_offsets=rows.dst_offsets + fits * target_item_bytes,
            items=rows.items - fits,
        )
        rows = rest.chosen(rest.items > 0)
    cut = concatenate(parts)
    return cut, np.searchsorted(edges, cut.src_offsets, "right") - 1


def without(copies: StridedCopies, done: StridedCopies) -> StridedCopies:
    """The part of `copies` whose destination bytes `done` has not written."""
    rows = single_rows(copies)
    have = single_rows(done)
    order = np.argsort(have.dst_offsets, kind="stable")
    starts = have.dst_offsets[order]
    ends = starts + have.row_bytes()[order]
    item_bytes = _item_bytes(rows.casts)
    left: list[tuple[int, int, int]] = []
    for index, (at, nbytes) in enumerate(
        zip(rows.dst_offsets.tolist(), rows.row_bytes().tolist(), strict=True)
    ):
        # The copies in `done` are disjoint, so their ends ascend as their starts do.
        near = int(np.searchsorted(ends, at, "right"))
        end = at + nbytes
        while at < end:
            until = min(end, int(starts[near])) if near < len(starts) else end
            if until > at:
                left.append((index, at, until))
            if near == len(starts):
                break
            at = max(at, min(end, int(ends[near])))
            near += 1
    owners, starts, ends = np.array(left, dtype=np.int64).reshape(-1, 3).T
    kept = rows.chosen(owners)
    before = (starts - kept.dst_offsets) // item_bytes[1][owners]
    return replace(
        kept,
        src_offsets=kept.src_offsets + before * item_bytes[0][owners],
        dst_offsets=starts,
        items=(ends - starts) // item_bytes[1][owners],
    )


def _item_bytes(casts: Ints) -> tuple[Ints, Ints]:
    """[copy] bytes of an item at source and destination."""
    is_cast = casts != BYTES_CAST
    codes = np.where(is_cast, casts, 0)
    return (
        np.where(is_cast, ITEM_BYTES[codes // len(DTYPES)], 1),
        np.where(is_cast, ITEM_BYTES[codes % len(DTYPES)], 1),
    )


def _batches(copies: StridedCopies, nbytes_max: int) -> Iterator[StridedCopies]:
    row_bytes, held_bytes = copies.row_bytes(), copies.row_bytes_at_source()
    sizes = row_bytes * copies.counts
    first, filled = 0, 0
    for index in range(len(copies)):
        size = int(sizes[index])
        if filled + size <= nbytes_max:
            filled += size
            continue
        if filled:
            yield copies.chosen(slice(first, index))
        first, filled = index, size
        if size > nbytes_max:
            yield from _pieces(
                copies, index, int(row_bytes[index]), int(held_bytes[index]), nbytes_max
            )
            first, filled = index + 1, 0
    if filled:
        yield copies.chosen(slice(first, len(copies)))


def _pieces(
    copies: StridedCopies, index: int, row_bytes: int, held_bytes: int, nbytes_max: int
) -> Iterator[StridedCopies]:
    """One long copy in pieces of at most `nbytes_max`: whole rows, or parts of a row."""
    one = copies.chosen(slice(index, index + 1))
    count, items = int(one.counts[0]), int(one.items[0])
    rows_max = max(1, nbytes_max // row_bytes)
    for row in range(0, count, rows_max):
        rows = min(rows_max, count - row)
        at = one.src_offsets + row * one.src_strides
        to = one.dst_offsets + row * one.dst_strides
        item_bytes, held_item_bytes = row_bytes // items, held_bytes // items
        items_max = items if row_bytes <= nbytes_max else max(1, nbytes_max // item_bytes)
        for item in range(0, items, items_max):
            yield StridedCopies(
                src_offsets=at + item * held_item_bytes,
                dst_offsets=to + item * item_bytes,
                items=np.minimum(one.items - item, items_max),
                counts=one.counts * 0 + rows,
                src_strides=one.src_strides,
                dst_strides=one.dst_strides,
                casts=one.casts,
            )
