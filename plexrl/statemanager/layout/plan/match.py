"""Matching of wanted slices with the held slices that contain them. Pure, linear in slices.

If the held boxes of a tensor differ in one dimension only, binary search along that dimension
matches them, for all such tensors at once. The other tensors (grids of expert and tensor parallel
shards, shards that overlap) are handled one by one: the edges of all held boxes cut a wanted box
into cells, and each cell lies wholly inside or wholly outside each held box.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plexrl.statemanager.layout.plan.columns import Ints, row_major_strides


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Non-empty boxes, one row each. Held boxes are sorted by `keys`."""

    keys: Ints
    """[row] index of the tensor."""
    offsets: Ints
    shapes: Ints
    """[row, dim], as are the offsets."""
    rows: Ints
    """[row] the caller's row of the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """Boxes that cover every wanted element once, each with the slices that contain all of it."""

    wants: Ints
    """[match] the caller's row of the wanted slice."""
    offsets: Ints
    shapes: Ints
    """[match, dim]"""
    first: Ints
    count: Ints
    """[match] range of `holders`: `holders[first : first + count]`."""
    holders: Ints
    """The caller's rows of held slices."""
    missing: dict[int, int]
    """Wanted row → number of its elements that no slice holds."""


def match(held: Boxes, wants: Boxes, global_shapes: Ints) -> Matches:
    """Match wanted boxes with held ones; `global_shapes` is [tensor, dim].

    Each held box is read once, so the time is linear in boxes and matches.
    """
    starts = (held.offsets * row_major_strides(global_shapes)[held.keys]).sum(axis=1)
    # The input is nearly sorted: every rank lists its tensors in about the same order.
    order = np.lexsort((starts, held.keys))
    held = Boxes(
        keys=held.keys[order],
        offsets=held.offsets[order],
        shapes=held.shapes[order],
        rows=held.rows[order],
    )
    starts = starts[order]
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (
        (held.keys[1:] != held.keys[:-1])
        | (starts[1:] != starts[:-1])
        | (held.shapes[1:] != held.shapes[:-1]).any(axis=1)
    )
    first = np.flatnonzero(is_new)
    replicas = np.diff(np.append(first, len(order)))
    distinct = Boxes(
        keys=held.keys[first], offsets=held.offsets[first], shapes=held.shapes[first], rows=first
    )
    cut_dims, is_simple = _cut_dims(distinct, global_shapes)
    simple = is_simple[wants.keys]
    in_line = is_simple[distinct.keys]
    along = _along_one_dim(
        _choose(distinct, in_line), replicas[in_line], _choose(wants, simple), cut_dims
    )
    if simple.all():
        return _join([along], held.rows)
    return _join([along, _by_cells(held, _choose(wants, ~simple))], held.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """As `Matches`, with holders as indices into the sorted held boxes."""

    wants: Ints
    offsets: Ints
    shapes: Ints
    count: Ints
    holders: Ints
    missing: dict[int, int]


def _cut_dims(distinct: Boxes, global_shapes: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """[tensor] the dimension in which the boxes differ, and whether it is the only one and the
    boxes do not overlap."""
    is_cut = np.zeros(global_shapes.shape, dtype=np.bool_)
    cut_rows, cut_dims = np.nonzero(distinct.shapes != global_shapes[distinct.keys])
    is_cut[distinct.keys[cut_rows], cut_dims] = True
    dims = is_cut.argmax(axis=1)
    is_simple = is_cut.sum(axis=1) <= 1
    at, end = _interval(distinct, dims)
    same = distinct.keys[1:] == distinct.keys[:-1]
    overlaps = same & (end[:-1] > at[1:])
    is_simple[distinct.keys[1:][overlaps]] = False
    return dims, is_simple


def _interval(boxes: Boxes, dims: Ints) -> tuple[Ints, Ints]:
    rows = np.arange(len(boxes.keys))
    at = boxes.offsets[rows, dims[boxes.keys]]
    return at, at + boxes.shapes[rows, dims[boxes.keys]]


def _along_one_dim(distinct: Boxes, replicas: Ints, wants: Boxes, cut_dims: Ints) -> _Part:
    held_at, held_end = _interval(distinct, cut_dims)
    want_at, want_end = _interval(wants, cut_dims)
    # One search for all tensors: tensor k has the positions from k * `stretch` on.
    stretch = int(max(held_end.max(initial=0), want_end.max(initial=0))) + 1
    low = np.searchsorted(
        distinct.keys * stretch + held_end, wants.keys * stretch + want_at, "right"
    )
    high = np.searchsorted(
        distinct.keys * stretch + held_at, wants.keys * stretch + want_end, "left"
    )
    # An interval is longer than the last box, so both bounds stay within the tensor's boxes.
    counts = np.maximum(high - low, 0)
    of_want = np.repeat(np.arange(len(counts)), counts)
    found = ranges(low, counts)
    at = np.maximum(held_at[found], want_at[of_want])
    extent = np.minimum(held_end[found], want_end[of_want]) - at
    covered = np.bincount(of_want, weights=extent, minlength=len(counts)).astype(np.int64)
    dims = cut_dims[wants.keys]
    offsets, shapes = wants.offsets[of_want], wants.shapes[of_want]
    places = np.arange(len(of_want))
    offsets[places, dims[of_want]] = at
    shapes[places, dims[of_want]] = extent
    missing = {}
    for row in np.flatnonzero(covered < want_end - want_at):
        size = int(wants.shapes[row].prod())
        whole = int(want_end[row] - want_at[row])
        missing[int(wants.rows[row])] = size // whole * (whole - int(covered[row]))
    return _Part(
        wants=wants.rows[of_want],
        offsets=offsets,
        shapes=shapes,
        count=replicas[found],
        holders=ranges(distinct.rows[found], replicas[found]),
        missing=missing,
    )


def _by_cells(held: Boxes, wants: Boxes) -> _Part:
    rows: list[Ints] = []
    offsets: list[Ints] = []
    shapes: list[Ints] = []
    counts: list[Ints] = []
    holders: list[Ints] = []
    missing: dict[int, int] = {}
    for at, extent, key, row in zip(
        wants.offsets, wants.shapes, wants.keys, wants.rows, strict=True
    ):
        first, last = np.searchsorted(held.keys, [key, key + 1])
        low, high = _cells(held.offsets[first:last], held.shapes[first:last], at, extent)
        ends = held.offsets[first:last] + held.shapes[first:last]
        covers = (held.offsets[None, first:last] <= low[:, None]).all(axis=2)
        covers &= (ends[None] >= high[:, None]).all(axis=2)
        count = covers.sum(axis=1)
        if not count.all():
            missing[int(row)] = int((high - low)[count == 0].prod(axis=1).sum())
            continue
        rows.append(np.full(len(low), row))
        offsets.append(low)
        shapes.append(high - low)
        counts.append(count)
        holders.append(first + np.nonzero(covers)[1])
    width = wants.offsets.shape[1]
    nothing = np.zeros((0, width), dtype=np.int64)
    return _Part(
        wants=np.concatenate([nothing[:, 0], *rows]),
        offsets=np.concatenate([nothing, *offsets]),
        shapes=np.concatenate([nothing, *shapes]),
        count=np.concatenate([nothing[:, 0], *counts]),
        holders=np.concatenate([nothing[:, 0], *holders]),
        missing=missing,
    )


def _cells(held_at: Ints, held_shape: Ints, at: Ints, extent: Ints) -> tuple[Ints, Ints]:
    """Lower and upper corners of the cells of a wanted box; the box itself if one held box contains
    all of it."""
    end = at + extent
    held_end = held_at + held_shape
    if ((held_at <= at) & (held_end >= end)).all(axis=1).any():
        return at[None], end[None]
    touching = ((held_at < end) & (held_end > at)).all(axis=1)
    lows, highs = [], []
    for dim in range(len(at)):
        edges = np.concatenate(
            [held_at[touching, dim], held_end[touching, dim], at[dim : dim + 1], end[dim : dim + 1]]
        )
        cuts = np.unique(np.clip(edges, at[dim], end[dim]))
        lows.append(cuts[:-1])
        highs.append(cuts[1:])
    grid = (-1, len(at))
    return (
        np.stack(np.meshgrid(*lows, indexing="ij"), axis=-1).reshape(grid),
        np.stack(np.meshgrid(*highs, indexing="ij"), axis=-1).reshape(grid),
    )


def _choose(boxes: Boxes, mask: npt.NDArray[np.bool_]) -> Boxes:
    if mask.all():
        return boxes
    return Boxes(
        keys=boxes.keys[mask],
        offsets=boxes.offsets[mask],
        shapes=boxes.shapes[mask],
        rows=boxes.rows[mask],
    )


def _join(parts: list[_Part], rows: Ints) -> Matches:
    count = np.concatenate([part.count for part in parts])
    return Matches(
        wants=np.concatenate([part.wants for part in parts]),
        offsets=np.concatenate([part.offsets for part in parts]),
        shapes=np.concatenate([part.shapes for part in parts]),
        first=np.cumsum(count) - count,
        count=count,
        holders=rows[np.concatenate([part.holders for part in parts])],
        missing={row: size for part in parts for row, size in part.missing.items()},
    )


def ranges(first: Ints, count: Ints) -> Ints:
    """For every i, the `count[i]` integers from `first[i]` on."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - count, count) + np.repeat(first, count)
