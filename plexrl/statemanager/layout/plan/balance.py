"""Which of several holders gives a piece: the one of the least accumulated latency. Pure.

Pieces that only one source has are counted first, then the others by size, which a greedy choice
balances better than the order of tensors does. What is large compared with a source's fair share
is cut before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from plexrl.statemanager.layout.plan.columns import Ints, Layout
from plexrl.statemanager.layout.plan.match import Matches, ranges

PIECES_PER_LINK = 4
"""A link's fair share is made of at least so many pieces, so it is met within an eighth or so."""
PIECE_BYTES_MIN = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Somebody who holds slices, and what it costs to have them from there."""

    id: str
    layout: Layout
    bytes_per_s: float = 10e9
    request_s: float = 0.0
    """Latency that every piece costs on top of its bytes."""
    link: str = ""
    """Sources of one link (a node's, say) are asked over it one after the other: their latency
    accumulates together. Empty: the source has one of its own."""


def in_fair_pieces(matches: Matches, item_bytes: Ints, links: int) -> Matches:
    """The same elements, in order of wanted slices; what several sources hold is cut along its
    outermost dimension into pieces small enough to balance."""
    order = np.argsort(matches.wants, kind="stable")
    if links < 2 or not (matches.count > 1).any():
        return replace(
            matches,
            wants=matches.wants[order],
            offsets=matches.offsets[order],
            shapes=matches.shapes[order],
            first=matches.first[order],
            count=matches.count[order],
        )
    nbytes = (matches.shapes.prod(axis=1) * item_bytes)[order]
    limit = max(PIECE_BYTES_MIN, int(nbytes.sum()) // (PIECES_PER_LINK * max(1, links)))
    shapes, count = matches.shapes[order], matches.count[order]
    outer = (shapes > 1).argmax(axis=1)
    rows = np.arange(len(order))
    extents = shapes[rows, outer]
    is_large = (count > 1) & (nbytes > limit)
    parts = np.where(is_large, np.minimum(extents, -(-nbytes // limit)), 1)
    match = np.repeat(rows, parts)
    part = ranges(np.zeros_like(parts), parts)
    first = extents[match] * part // parts[match]
    last = extents[match] * (part + 1) // parts[match]
    pieces = np.arange(len(match))
    offsets, shapes = matches.offsets[order][match], shapes[match]
    offsets[pieces, outer[match]] += first
    shapes[pieces, outer[match]] = last - first
    return replace(
        matches,
        wants=matches.wants[order][match],
        offsets=offsets,
        shapes=shapes,
        first=matches.first[order][match],
        count=count[match],
    )


def assign(matches: Matches, nbytes: Ints, owner_of: Ints, sources: Sequence[Source]) -> Ints:
    """[match] the held row that gives it.

    `nbytes` are [match]; `owner_of` is the source of every held row.
    """
    first, count = matches.first, matches.count
    rows = matches.holders[first] if len(first) else first
    slowness = np.array([1.0 / source.bytes_per_s for source in sources])
    request = np.array([source.request_s for source in sources])
    names = [source.link or f"\0{index}" for index, source in enumerate(sources)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    links = np.array([numbers[name] for name in names], dtype=np.int64)
    busy = np.zeros(len(numbers))
    forced = np.flatnonzero(count == 1)
    if len(forced):
        owners = owner_of[rows[forced]]
        cost = nbytes[forced] * slowness[owners] + request[owners]
        busy = busy + np.bincount(links[owners], weights=cost, minlength=len(numbers))
    free = np.flatnonzero(count > 1)
    free = free[np.argsort(-nbytes[free], kind="stable")]
    load, slow, ask, link_of = busy.tolist(), slowness.tolist(), request.tolist(), links.tolist()
    sizes = nbytes[free].tolist()
    for index, at, many, size in zip(
        free.tolist(), first[free].tolist(), count[free].tolist(), sizes, strict=True
    ):
        candidates = matches.holders[at : at + many]
        best_row, best_owner, best_s = -1, -1, float("inf")
        for row, owner in zip(candidates.tolist(), owner_of[candidates].tolist(), strict=True):
            done_s = load[link_of[owner]] + ask[owner] + size * slow[owner]
            if done_s < best_s or (done_s == best_s and owner < best_owner):
                best_row, best_owner, best_s = row, owner, done_s
        load[link_of[best_owner]] = best_s
        rows[index] = best_row
    return rows
