"""Balance of a plan over its sources: the source with the least accumulated latency sends. Pure.

Pieces with a single source are assigned first, then the others by descending size: a greedy choice
balances better in that order than in the order of tensors. Pieces that are large compared with a
source's fair share are split before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from plexrl.statemanager.layout.plan.columns import Ints, Layout
from plexrl.statemanager.layout.plan.match import Matches, ranges

PIECES_PER_LINK = 4
"""Minimum number of pieces in a link's fair share; keeps the imbalance at about an eighth."""
PIECE_BYTES_MIN = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSource:
    """A holder of slices, and the cost model of reading from it."""

    id: str
    layout: Layout
    bytes_per_s: float = 10e9
    request_s: float = 0.0
    """Latency of each piece in addition to its bytes."""
    link: str = ""
    """Sources with the same link (for example a node) share its bandwidth, so their latencies add
    up. Empty: a link of its own."""


def in_fair_pieces(matches: Matches, item_bytes: Ints, links: int) -> Matches:
    """The matches in the order of wanted slices. Those with several holders are split along
    their outermost dimension into pieces small enough to balance."""
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


def assign(matches: Matches, nbytes: Ints, owner_of: Ints, sources: Sequence[PullSource]) -> Ints:
    """[match] the held row that sends it.

    `nbytes` is [match]; `owner_of` is the source of each held row.
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
