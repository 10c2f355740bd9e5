"""Boxes as bytes: rows at regular distances, long ones where they touch. Pure.

A run is `count` rows of `items` items each, a stride apart on either side; a contiguous piece of
memory is a run of one row. An item is one byte, or one element where its dtype is cast on the way.
So a tensor-parallel shard of a matrix is one run, and a request for a whole model stays short.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from plexrl.statemanager.layout.plan.columns import DTYPES, ITEM_BYTES, Ints

BYTES_CAST = -1
"""The cast of a run whose bytes are only moved."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """One run a row, in columns of equal length. Not to be changed."""

    places: Ints
    """Of the first row, in bytes from the start of the source's memory."""
    targets: Ints
    """Of the first row, in bytes from the start of the target's memory."""
    items: Ints
    """Of one row."""
    counts: Ints
    """Rows."""
    strides: Ints
    """Bytes from row to row at the source; 0 where there is one row."""
    target_strides: Ints
    casts: Ints
    """`BYTES_CAST`, or source dtype's code * len(DTYPES) + target dtype's code."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """That arrive at the target."""
        return int(self.row_bytes().dot(self.counts))

    def row_bytes(self) -> Ints:
        """[run] bytes of one row as it arrives."""
        return self.items * _item_bytes(self.casts)[1]

    def row_bytes_at_source(self) -> Ints:
        """[run] bytes of one row as it is held."""
        return self.items * _item_bytes(self.casts)[0]

    def chosen(self, rows: object) -> "Runs":
        """The runs that `rows` (a numpy index) selects."""
        return Runs(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def moved(self, distance: int) -> "Runs":
        """The same runs, read `distance` bytes further on."""
        return replace(self, places=self.places + distance)

    def batches(self, nbytes_max: int) -> Iterator["Runs"]:
        """The same runs in order, cut so that each batch has at most `nbytes_max` bytes, or one
        row of one item where that is more."""
        return _batches(self, nbytes_max)


NO_RUNS = Runs(**{field.name: np.zeros(0, dtype=np.int64) for field in fields(Runs)})


def concatenated(parts: list[Runs]) -> Runs:
    """All runs of `parts`, in order."""
    return Runs(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in [NO_RUNS, *parts]])
            for field in fields(Runs)
        }
    )


def one_range(start: int, nbytes: int) -> Runs:
    """`nbytes` bytes from `start` on, to the start of the target."""
    one, zero = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return Runs(
        places=one * start,
        targets=zero,
        items=one * nbytes,
        counts=one,
        strides=zero,
        target_strides=zero,
        casts=one * BYTES_CAST,
    )


def cast_names(code: int) -> tuple[str, str]:
    """Source and target dtype of a cast other than `BYTES_CAST`."""
    return DTYPES[code // len(DTYPES)], DTYPES[code % len(DTYPES)]


def runs_of_boxes(
    shapes: Ints,
    strides: Ints,
    target_strides: Ints,
    places: Ints,
    targets: Ints,
    dtypes: tuple[Ints, Ints],
) -> tuple[Runs, Ints]:
    """Runs of boxes of `shapes` [box, dim] that begin at `places` and `targets`, and the box that
    each run is of.

    Strides are [box, dim] in elements; `dtypes` are codes at source and target.
    """
    boxes, dims = shapes.shape
    items, counts = np.ones(boxes, dtype=np.int64), np.ones(boxes, dtype=np.int64)
    step, target_step = np.zeros(boxes, dtype=np.int64), np.zeros(boxes, dtype=np.int64)
    outer = np.ones_like(shapes)
    for dim in reversed(range(dims)):
        extent, at_source, at_target = shapes[:, dim], strides[:, dim], target_strides[:, dim]
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
        to = to + index * target_strides[box, dim] * to_bytes[box]
    items = np.where(casts == BYTES_CAST, items * to_bytes, items)
    runs = Runs(
        places=at,
        targets=to,
        items=items[box],
        counts=counts[box],
        strides=(step * from_bytes)[box],
        target_strides=(target_step * to_bytes)[box],
        casts=casts[box],
    )
    return runs, box


def coalesced(runs: Runs, groups: Ints) -> tuple[Runs, Ints]:
    """The same bytes in as few runs as neighbours in order allow, and each one's group.

    Only runs of one row, one group and one cast join.
    """
    if len(runs) < 2:
        return runs, groups
    alone = runs.counts == 1
    joins = alone[1:] & alone[:-1]
    joins &= (groups[1:] == groups[:-1]) & (runs.casts[1:] == runs.casts[:-1])
    joins &= runs.places[1:] == (runs.places + runs.row_bytes_at_source())[:-1]
    joins &= runs.targets[1:] == (runs.targets + runs.row_bytes())[:-1]
    first = np.flatnonzero(np.append(True, ~joins))
    items = np.add.reduceat(runs.items, first)
    return replace(runs.chosen(first), items=items), groups[first]


def single_rows(runs: Runs) -> Runs:
    """The same bytes, every row a run of its own."""
    run = np.repeat(np.arange(len(runs)), runs.counts)
    row = np.arange(len(run)) - np.repeat(np.cumsum(runs.counts) - runs.counts, runs.counts)
    ones = np.ones(len(run), dtype=np.int64)
    return Runs(
        places=runs.places[run] + row * runs.strides[run],
        targets=runs.targets[run] + row * runs.target_strides[run],
        items=runs.items[run],
        counts=ones,
        strides=ones * 0,
        target_strides=ones * 0,
        casts=runs.casts[run],
    )


def packed(runs: Runs) -> Runs:
    """The runs as they are read, brought to one place without gaps: what travels on a stream."""
    row_bytes = runs.row_bytes()
    sizes = row_bytes * runs.counts
    return replace(runs, targets=np.cumsum(sizes) - sizes, target_strides=row_bytes)


def unpacked(runs: Runs) -> Runs:
    """From where `packed` brought the runs to where they are wanted."""
    row_bytes = runs.row_bytes()
    sizes = row_bytes * runs.counts
    return replace(
        runs,
        places=np.cumsum(sizes) - sizes,
        items=row_bytes,
        strides=row_bytes,
        casts=np.full(len(runs), BYTES_CAST),
    )


def reversed_runs(runs: Runs) -> Runs:
    """From where the runs arrive, without a cast: what reads a target's own bytes."""
    return replace(
        runs,
        places=runs.targets,
        targets=runs.places,
        items=runs.row_bytes(),
        strides=runs.target_strides,
        target_strides=runs.strides,
        casts=np.full(len(runs), BYTES_CAST),
    )


def cut_at(runs: Runs, edges: Ints) -> tuple[Runs, Ints]:
    """The same bytes in runs that lie between two neighbouring `edges` each at the source, and the
    index of the edge before each. The first edge is at or before every run."""
    ends = runs.places + (runs.counts - 1) * runs.strides + runs.row_bytes_at_source()
    homes = np.searchsorted(edges, runs.places, "right") - 1
    limits = np.append(edges[1:], np.iinfo(np.int64).max)
    crosses = ends > limits[homes]
    if not crosses.any():
        return runs, homes
    parts: list[Runs] = [runs.chosen(~crosses)]
    rows = single_rows(runs.chosen(crosses))
    while len(rows):
        item_bytes, target_item_bytes = _item_bytes(rows.casts)
        limit = limits[np.searchsorted(edges, rows.places, "right") - 1]
        fits = np.minimum(rows.items, (limit - rows.places) // item_bytes)
        assert fits.all(), "an element lies on both sides of an edge, which is a page's"
        parts.append(replace(rows, items=fits))
        rest = replace(
            rows,
            places=rows.places + fits * item_bytes,
            targets=rows.targets + fits * target_item_bytes,
            items=rows.items - fits,
        )
        rows = rest.chosen(rest.items > 0)
    cut = concatenated(parts)
    return cut, np.searchsorted(edges, cut.places, "right") - 1


def without(runs: Runs, done: Runs) -> Runs:
    """What of `runs` does not arrive where `done` has arrived already."""
    rows = single_rows(runs)
    have = single_rows(done)
    order = np.argsort(have.targets, kind="stable")
    starts = have.targets[order]
    ends = starts + have.row_bytes()[order]
    item_bytes = _item_bytes(rows.casts)
    left: list[tuple[int, int, int]] = []
    for index, (at, nbytes) in enumerate(
        zip(rows.targets.tolist(), rows.row_bytes().tolist(), strict=True)
    ):
        # What has arrived is disjoint, so ends are in order as starts are.
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
    before = (starts - kept.targets) // item_bytes[1][owners]
    return replace(
        kept,
        places=kept.places + before * item_bytes[0][owners],
        targets=starts,
        items=(ends - starts) // item_bytes[1][owners],
    )


def _item_bytes(casts: Ints) -> tuple[Ints, Ints]:
    """[run] bytes of an item at source and target."""
    is_cast = casts != BYTES_CAST
    codes = np.where(is_cast, casts, 0)
    return (
        np.where(is_cast, ITEM_BYTES[codes // len(DTYPES)], 1),
        np.where(is_cast, ITEM_BYTES[codes % len(DTYPES)], 1),
    )


def _batches(runs: Runs, nbytes_max: int) -> Iterator[Runs]:
    row_bytes, held_bytes = runs.row_bytes(), runs.row_bytes_at_source()
    sizes = row_bytes * runs.counts
    first, filled = 0, 0
    for index in range(len(runs)):
        size = int(sizes[index])
        if filled + size <= nbytes_max:
            filled += size
            continue
        if filled:
            yield runs.chosen(slice(first, index))
        first, filled = index, size
        if size > nbytes_max:
            yield from _pieces(
                runs, index, int(row_bytes[index]), int(held_bytes[index]), nbytes_max
            )
            first, filled = index + 1, 0
    if filled:
        yield runs.chosen(slice(first, len(runs)))


def _pieces(
    runs: Runs, index: int, row_bytes: int, held_bytes: int, nbytes_max: int
) -> Iterator[Runs]:
    """One long run in pieces of at most `nbytes_max`: of whole rows, or of parts of a row."""
    one = runs.chosen(slice(index, index + 1))
    count, items = int(one.counts[0]), int(one.items[0])
    rows_max = max(1, nbytes_max // row_bytes)
    for row in range(0, count, rows_max):
        rows = min(rows_max, count - row)
        at = one.places + row * one.strides
        to = one.targets + row * one.target_strides
        item_bytes, held_item_bytes = row_bytes // items, held_bytes // items
        items_max = items if row_bytes <= nbytes_max else max(1, nbytes_max // item_bytes)
        for item in range(0, items, items_max):
            yield Runs(
                places=at + item * held_item_bytes,
                targets=to + item * item_bytes,
                items=np.minimum(one.items - item, items_max),
                counts=one.counts * 0 + rows,
                strides=one.strides,
                target_strides=one.target_strides,
                casts=one.casts,
            )
