"""Layout of a version's stored data: sections, extents, and the offset of each slice. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

import msgspec
import xxhash

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.keys import ARENA_ALIGNMENT, StateSlice
from plexrl.statemanager.layout.versions import Extent, Manifest, Section, padded

_Identity = tuple[object, ...]
"""Identity of a slice, independent of its offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLayout:
    """Layout of a version's data."""

    sections: tuple[Section, ...]
    extents: tuple[Extent, ...]
    nbytes: int


def lay_out(
    slices: Sequence[StateSlice],
    rank: int = 0,
    others: Mapping[int, Iterable[StateSlice]] = MappingProxyType({}),
    apart: Sequence[StateSlice] = (),
) -> DataLayout:
    """A data layout for `slices`; `others` are the slices of the deployment's other ranks.

    Slices that the same ranks hold are in one section, so that these ranks can share its stored
    bytes. The slices in `apart` have the last section to themselves. Slices of a section that are
    adjacent in the arena (up to alignment) form one extent, so that a move takes a few long copies
    whatever the number of tensors.
    """
    holders: dict[_Identity, set[int]] = {}
    for other, held in others.items():
        for piece in held:
            holders.setdefault(_identity(piece), set()).add(other)
    groups: dict[tuple[int, ...], list[StateSlice]] = {}
    for piece in slices:
        ranks = holders.get(_identity(piece), set()) if holders else set()
        groups.setdefault(tuple(sorted({rank, *ranks})) if ranks else (), []).append(piece)
    ordered = sorted(groups)
    return _lay_out([*(groups[ranks] for ranks in ordered), apart], [*map(bool, ordered), False])


def check_layout(manifest: Manifest) -> None:
    """Check that `lay_out` can have made a manifest's layout.

    Raises:
        InvalidRequestError: its sections or extents do not match its slices.
    """
    groups: list[list[StateSlice]] = [[] for _ in manifest.sections]
    starts = [section.start for section in manifest.sections]
    nonempty = [piece for piece in manifest.slices if piece.nbytes]
    homes = _homes(manifest.extents, nonempty)
    for piece, home in zip(nonempty, homes, strict=True):
        if home is None or not groups:
            raise InvalidRequestError(f"{manifest.description} has a slice outside its extents")
        groups[max(0, bisect_right(starts, home) - 1)].append(piece)
    layout = _lay_out(groups, [bool(section.share_key) for section in manifest.sections])
    if (layout.extents, layout.nbytes) != (manifest.extents, manifest.nbytes) or [
        (section.start, section.nbytes) for section in layout.sections
    ] != [(section.start, section.nbytes) for section in manifest.sections]:
        raise InvalidRequestError(
            f"the sections or extents of {manifest.description} do not match its slices"
        )


def slices_in_data(manifest: Manifest) -> tuple[StateSlice, ...]:
    """The version's slices, with offsets in the data as their `arena_offset`."""
    homes = _homes(manifest.extents, manifest.slices)
    return tuple(
        replace(piece, arena_offset=home or 0)
        for piece, home in zip(manifest.slices, homes, strict=True)
    )


class ExtentMap:
    """Maps ranges of the data to ranges of the arena."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents = extents
        self._starts = [extent.file_offset for extent in extents]

    def overlaps(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(arena offset, data offset, bytes) of every extent's part of [start, end) of the data."""
        first = max(0, bisect_right(self._starts, start) - 1)
        for extent in islice(self._extents, first, None):
            if extent.file_offset >= end:
                return
            begin = max(start, extent.file_offset)
            stop = min(end, extent.file_offset + extent.nbytes)
            if begin < stop:
                yield extent.arena_offset + begin - extent.file_offset, begin, stop - begin

    def uncovered(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """(data offset, bytes) of every range of [start, end) that no extent covers."""
        for _, begin, nbytes in self.overlaps(start, end):
            if begin > start:
                yield start, begin - start
            start = begin + nbytes
        if end > start:
            yield start, end - start


def _lay_out(groups: Sequence[Sequence[StateSlice]], is_shared: Sequence[bool]) -> DataLayout:
    sections: list[Section] = []
    extents: list[Extent] = []
    size = 0
    for group, shared in zip(groups, is_shared, strict=True):
        ordered = sorted((p for p in group if p.nbytes), key=lambda piece: piece.arena_offset)
        if not ordered:
            continue
        start = padded(size)
        first = len(extents)
        # The growing extent: its start and end in the arena, and its offset in the data.
        begin = end = place = -1
        for piece in ordered:
            at = piece.arena_offset
            if end < 0 or not 0 <= at - end < ARENA_ALIGNMENT:
                if end >= 0:
                    extents.append(_extent(begin, end, place))
                place = padded(place + end - begin, ARENA_ALIGNMENT) if end >= 0 else start
                begin = at
            end = at + piece.nbytes
        extents.append(_extent(begin, end, place))
        size = place + end - begin
        share_key = _share_key(ordered, extents[first:], start) if shared else ""
        sections.append(Section(start=start, nbytes=size - start, share_key=share_key))
    return DataLayout(sections=tuple(sections), extents=tuple(extents), nbytes=size)


def _extent(begin: int, end: int, place: int) -> Extent:
    return Extent(arena_offset=begin, file_offset=place, nbytes=end - begin)


def _share_key(slices: Sequence[StateSlice], extents: Sequence[Extent], start: int) -> str:
    """Equal for sections of two ranks that hold the same slices at the same offsets."""
    homes = _homes(extents, slices)
    content = [
        (piece.key, piece.dtype, piece.global_shape, piece.offset, piece.shape, (home or 0) - start)
        for piece, home in zip(slices, homes, strict=True)
    ]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(content))


def _homes(extents: Sequence[Extent], slices: Sequence[StateSlice]) -> list[int | None]:
    """The offset of each slice in the data; None for an empty slice or one in no extent."""
    ordered = sorted(extents, key=lambda extent: extent.arena_offset)
    starts = [extent.arena_offset for extent in ordered]
    found: list[int | None] = []
    for piece in slices:
        at = bisect_right(starts, piece.arena_offset) - 1
        home = None
        if piece.nbytes and at >= 0:
            extent = ordered[at]
            inside = piece.arena_offset - extent.arena_offset
            if inside + piece.nbytes <= extent.nbytes:
                home = extent.file_offset + inside
        found.append(home)
    return found


def _identity(piece: StateSlice) -> _Identity:
    key = piece.key
    return (key.part, key.name, piece.dtype, piece.global_shape, piece.offset, piece.shape)
