"""Transfer plans: which source sends which bytes to which target, for loads and weight sync. Pure.

Invariants:

- Every wanted element is delivered exactly once: a target receives the bytes of its own slices, and
  nothing outside a source's slices is read.
- If several sources hold a piece, the one with the least accumulated latency sends it (StaleFlow
  App. A.2).
- A plan contains offsets in layouts, not versions or addresses. It is made once for a set of
  layouts and reused at every sync. Equal inputs give equal plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plexrl.errors import InvalidRequestError, StateLostError
from plexrl.statemanager.layout.keys import StateKey
from plexrl.statemanager.layout.plan.balance import PullSource, assign, in_fair_pieces
from plexrl.statemanager.layout.plan.columns import (
    DTYPES,
    ITEM_BYTES,
    Ints,
    Layout,
    widened,
)
from plexrl.statemanager.layout.plan.match import Boxes, Matches, match
from plexrl.statemanager.layout.strided.casts import CAST_RULES
from plexrl.statemanager.layout.strided.copies import (
    NO_COPIES,
    StridedCopies,
    coalesce,
    copies_of_boxes,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetPlan:
    """The copies that one target receives, by source, in the order of their requests."""

    copies: Mapping[int, StridedCopies]
    """Source index → its copies, in order of source offset."""
    nbytes: int
    """Bytes received: those of the target's own slices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """All copies between a set of sources and a set of targets."""

    targets: tuple[TargetPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Transfers:
    """Boxes to move, one row each."""

    held: "SourcePool"
    wanted: "SourcePool"
    rows: Ints
    """[transfer] row in `held`."""
    wants: Ints
    """[transfer] row in `wanted`."""
    offsets: Ints
    shapes: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourcePool:
    """The slices of several layouts, concatenated."""

    layouts: tuple[Layout, ...]
    first: Ints
    """[layout] index of its first row."""
    owners: Ints
    """[row] index of its layout."""
    dtypes: Ints
    global_shapes: Ints
    offsets: Ints
    shapes: Ints
    strides: Ints
    byte_offsets: Ints
    dims: Ints

    @classmethod
    def of(cls, layouts: Sequence[Layout], width: int) -> "SourcePool":
        """Concatenate layouts, with `width` dimensions."""
        counts = np.array([len(layout) for layout in layouts], dtype=np.int64)
        shapes = np.concatenate([widened(layout.shapes, width, 1) for layout in layouts])
        return cls(
            layouts=tuple(layouts),
            first=np.cumsum(counts) - counts,
            owners=np.repeat(np.arange(len(layouts)), counts),
            dtypes=np.concatenate([layout.dtypes for layout in layouts]),
            global_shapes=np.concatenate(
                [widened(layout.global_shapes, width, 1) for layout in layouts]
            ),
            offsets=np.concatenate([widened(layout.offsets, width, 0) for layout in layouts]),
            shapes=shapes,
            strides=np.concatenate([widened(layout.strides, width, 1) for layout in layouts]),
            byte_offsets=np.concatenate([layout.byte_offsets for layout in layouts]),
            dims=np.concatenate([layout.dims for layout in layouts]),
        )

    def key(self, row: int) -> StateKey:
        """The key of one slice."""
        owner = int(self.owners[row])
        return self.layouts[owner].key(row - int(self.first[owner]))


def make_plan(sources: Sequence[PullSource], targets: Sequence[Layout]) -> Plan:
    """The plan that fills every slice of every target from `sources`.

    Ties between sources go to the first in the input.

    Raises:
        StateLostError: no source holds some part of a wanted slice.
        InvalidRequestError: a source and a target give a tensor different shapes, or dtypes between
            which no cast is supported.
    """
    layouts = [source.layout for source in sources]
    width = max((layout.shapes.shape[1] for layout in (*layouts, *targets)), default=1)
    wanted = SourcePool.of(targets, width)
    held = SourcePool.of(layouts or [Layout.of(())], width)
    numbers: dict[str, int] = {}
    for layout in targets:
        for token in layout.tokens:
            numbers.setdefault(token, len(numbers))
    want_keys, held_keys = _number(wanted, numbers), _number(held, numbers)
    needed = np.flatnonzero(wanted.shapes.all(axis=1))
    useful = np.flatnonzero((held_keys >= 0) & held.shapes.all(axis=1))
    global_shapes = np.zeros((len(numbers), width), dtype=np.int64)
    global_shapes[want_keys] = wanted.global_shapes
    _check_alike(held, held_keys, useful, wanted, want_keys, needed, global_shapes)
    matches = match(
        _boxes(held, held_keys, useful), _boxes(wanted, want_keys, needed), global_shapes
    )
    _check_complete(matches, wanted)
    item_bytes = ITEM_BYTES[wanted.dtypes[matches.wants]]
    matches = in_fair_pieces(matches, item_bytes, len({s.link or s.id for s in sources}))
    nbytes = matches.shapes.prod(axis=1) * ITEM_BYTES[wanted.dtypes[matches.wants]]
    transfers = _Transfers(
        held=held,
        wanted=wanted,
        rows=assign(matches, nbytes, held.owners, sources),
        wants=matches.wants,
        offsets=matches.offsets,
        shapes=matches.shapes,
    )
    return Plan(targets=_target_plans(transfers, len(targets), len(sources)))


def _number(pool: SourcePool, numbers: Mapping[str, int]) -> Ints:
    found: list[Ints] = [np.zeros(0, dtype=np.int64)]
    former: tuple[tuple[str, ...], Ints] | None = None
    for layout in pool.layouts:
        # Ranks of one deployment usually list the same tensors in the same order.
        if former is None or former[0] != layout.tokens:
            column = np.array([numbers.get(token, -1) for token in layout.tokens], dtype=np.int64)
            former = (layout.tokens, column)
        found.append(former[1])
    return np.concatenate(found)


def _boxes(pool: SourcePool, keys: Ints, rows: Ints) -> Boxes:
    return Boxes(keys=keys[rows], offsets=pool.offsets[rows], shapes=pool.shapes[rows], rows=rows)


def _check_alike(
    held: SourcePool,
    held_keys: Ints,
    useful: Ints,
    wanted: SourcePool,
    want_keys: Ints,
    needed: Ints,
    global_shapes: Ints,
) -> None:
    """Check that shapes agree and that dtypes are equal or castable."""
    for pool, keys, rows in ((wanted, want_keys, needed), (held, held_keys, useful)):
        wrong = rows[(pool.global_shapes[rows] != global_shapes[keys[rows]]).any(axis=1)]
        if len(wrong):
            row = int(wrong[0])
            expected = _shape(global_shapes[keys[row]], int(pool.dims[row]))
            found = _shape(pool.global_shapes[row], int(pool.dims[row]))
            raise InvalidRequestError(
                f"{pool.key(row).name} has the shape {found} at one rank and {expected} at "
                "another: use the same model for both",
                key=pool.key(row).name,
            )
    held_dtypes = np.full(len(global_shapes), -1, dtype=np.int64)
    held_dtypes[held_keys[useful]] = held.dtypes[useful]
    mixed = useful[held.dtypes[useful] != held_dtypes[held_keys[useful]]]
    if len(mixed):
        name = held.key(int(mixed[0])).name
        raise InvalidRequestError(
            f"{name} is held in two dtypes: publish it in one from every rank", key=name
        )
    dtypes = held_dtypes[want_keys[needed]]
    differs = needed[(dtypes >= 0) & (dtypes != wanted.dtypes[needed])]
    if not len(differs):
        return
    for code in np.unique(held_dtypes[want_keys[differs]] * len(DTYPES) + wanted.dtypes[differs]):
        pair = DTYPES[code // len(DTYPES)], DTYPES[code % len(DTYPES)]
        if pair not in CAST_RULES:
            row = next(
                int(row)
                for row in differs
                if (DTYPES[held_dtypes[want_keys[row]]], DTYPES[wanted.dtypes[row]]) == pair
            )
            name = wanted.key(row).name
            raise InvalidRequestError(
                f"{name} is held as {pair[0]} and wanted as {pair[1]}; that cast is not supported: "
                "request it in the dtype it has",
                key=name,
            )


def _check_complete(matches: Matches, wanted: SourcePool) -> None:
    if matches.missing:
        row = min(matches.missing)
        name = wanted.key(row).name
        raise StateLostError(
            f"no shard holds all of {name}: {matches.missing[row]} elements are missing; publish "
            "the weights again",
            key=name,
        )


def _byte_offsets(pool: SourcePool, rows: Ints, offsets: Ints) -> Ints:
    inner = ((offsets - pool.offsets[rows]) * pool.strides[rows]).sum(axis=1)
    byte_offsets: Ints = pool.byte_offsets[rows] + inner * ITEM_BYTES[pool.dtypes[rows]]
    return byte_offsets


def _target_plans(transfers: _Transfers, targets: int, sources: int) -> tuple[TargetPlan, ...]:
    held, wanted = transfers.held, transfers.wanted
    rows, wants = transfers.rows, transfers.wants
    copies, box = copies_of_boxes(
        transfers.shapes,
        held.strides[rows],
        wanted.strides[wants],
        _byte_offsets(held, rows, transfers.offsets),
        _byte_offsets(wanted, wants, transfers.offsets),
        (held.dtypes[rows], wanted.dtypes[wants]),
    )
    # One number for each (target, source) pair.
    pairs = wanted.owners[wants][box] * max(1, sources) + held.owners[rows][box]
    order = np.lexsort((copies.src_offsets, pairs))
    copies, pairs = coalesce(copies.chosen(order), pairs[order])
    edges = np.searchsorted(pairs, np.arange(targets * max(1, sources) + 1))
    plans = []
    for target in range(targets):
        mine: dict[int, StridedCopies] = {}
        for source in range(sources):
            pair = target * sources + source
            if edges[pair] < edges[pair + 1]:
                mine[source] = copies.chosen(slice(int(edges[pair]), int(edges[pair + 1])))
        plans.append(
            TargetPlan(
                copies=mine, nbytes=sum((part.nbytes for part in mine.values()), NO_COPIES.nbytes)
            )
        )
    return tuple(plans)


def _shape(row: Ints, dims: int) -> list[int]:
    shape: list[int] = row[len(row) - dims :].tolist()
    return shape
