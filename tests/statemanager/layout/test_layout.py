"""How data is laid out: every slice once, replicas apart, and found again."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.layout import ExtentMap, check_layout, lay_out, slices_in_data
from plexrl.statemanager.layout.versions import Extent, Manifest, VersionKind

PAGE = 4096


def a_slice(name: str, size: int, at: int, rank: int = 0) -> StateSlice:
    return StateSlice(
        key=StateKey(part=StatePart.PARAMETER, name=name),
        dtype="U8",
        global_shape=(8 * size,),
        offset=(rank * size,),
        shape=(size,),
        arena_offset=at,
    )


@st.composite
def ranks(draw: st.DrawFn) -> list[tuple[StateSlice, ...]]:
    """What three ranks hold: tensors that all, some or one of them have, in arenas with holes."""
    held: list[list[StateSlice]] = [[], [], []]
    ends = [0, 0, 0]
    for index, (holders, size) in enumerate(
        draw(st.lists(st.tuples(st.sets(st.integers(0, 2), min_size=1), st.integers(0, 3 * PAGE))))
    ):
        hole = draw(st.sampled_from([0, 64, 4096]))
        for rank in holders:
            held[rank].append(a_slice(f"t{index}", size, ends[rank] + hole))
            ends[rank] += -(-(hole + size) // 64) * 64
    return [tuple(slices) for slices in held]


def manifest_of(held: list[tuple[StateSlice, ...]], rank: int) -> Manifest:
    others = {other: slices for other, slices in enumerate(held) if other != rank}
    layout = lay_out(held[rank], rank, others)
    return Manifest(
        deployment="job/actor",
        rank=rank,
        world_size=3,
        seq=1,
        kind=VersionKind.STATE,
        parts=(),
        meta_json="{}",
        slices=held[rank],
        extents=layout.extents,
        nbytes=layout.nbytes,
        sections=layout.sections,
    )


@given(ranks())
def test_every_byte_of_every_slice_has_a_place_of_its_own(
    held: list[tuple[StateSlice, ...]],
) -> None:
    for rank in range(3):
        manifest = manifest_of(held, rank)
        taken: set[int] = set()
        places = ExtentMap(manifest.extents)
        for piece, placed in zip(manifest.slices, slices_in_data(manifest), strict=True):
            if not piece.nbytes:
                continue
            start = placed.arena_offset
            assert start + piece.nbytes <= manifest.nbytes
            found = list(places.overlaps(start, start + piece.nbytes))
            assert found == [(piece.arena_offset, start, piece.nbytes)]
            span = set(range(start, start + piece.nbytes, 64))
            assert not span & taken
            taken |= span


@given(ranks())
def test_ranks_that_hold_the_same_find_each_other(held: list[tuple[StateSlice, ...]]) -> None:
    manifests = [manifest_of(held, rank) for rank in range(3)]
    for manifest in manifests:
        placed = slices_in_data(manifest)
        for section in manifest.sections:
            inside = [
                piece
                for piece in placed
                if piece.nbytes and 0 <= piece.arena_offset - section.start < section.nbytes
            ]
            names = {piece.key.name for piece in inside}
            holders = {
                rank for rank in range(3) if names & {s.key.name for s in held[rank] if s.nbytes}
            }
            assert bool(section.share_key) == (len(holders) > 1)
            for other in holders if section.share_key else ():
                assert section.share_key in [s.share_key for s in manifests[other].sections] or (
                    # In another order, or with other holes, the same slices are another section.
                    [s.arena_offset for s in held[other]]
                    != [s.arena_offset for s in manifest.slices]
                )


@given(ranks())
def test_sections_are_whole_pages_one_after_the_other(held: list[tuple[StateSlice, ...]]) -> None:
    manifest = manifest_of(held, 0)
    end = 0
    for section in manifest.sections:
        assert section.start == -(-end // PAGE) * PAGE
        assert section.nbytes > 0
        end = section.start + section.nbytes
    assert end == manifest.nbytes


@given(ranks())
def test_what_was_laid_out_here_is_accepted_elsewhere(held: list[tuple[StateSlice, ...]]) -> None:
    for rank in range(3):
        check_layout(manifest_of(held, rank))


@pytest.mark.parametrize("change", ["extent", "sections", "nbytes", "slices"])
def test_a_layout_that_cannot_be_is_refused(change: str) -> None:
    shared = a_slice("b", PAGE, PAGE)
    manifest = manifest_of([(a_slice("a", PAGE, 0), shared), (shared,), ()], 0)
    assert len(manifest.sections) == 2
    first = manifest.extents[0]
    wrong = {
        "extent": replace(manifest, extents=(replace(first, nbytes=64), *manifest.extents[1:])),
        "sections": replace(manifest, sections=manifest.sections[:1]),
        "nbytes": replace(manifest, nbytes=manifest.nbytes + 1),
        "slices": replace(manifest, slices=(replace(shared, arena_offset=9 * PAGE),)),
    }
    with pytest.raises(InvalidRequestError, match=r"do not match its slices|outside its extents"):
        check_layout(wrong[change])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9))), st.integers(0, 60))
def test_what_no_extent_covers_is_the_rest(gaps: list[tuple[int, int]], end: int) -> None:
    extents, at = [], 0
    for gap, nbytes in gaps:
        extents.append(Extent(arena_offset=1000 + at, file_offset=at + gap, nbytes=nbytes))
        at += gap + nbytes
    places = ExtentMap(extents)
    covered = {b for _, start, n in places.overlaps(3, end) for b in range(start, start + n)}
    rest = {b for start, n in places.uncovered(3, end) for b in range(start, start + n)}
    assert not covered & rest
    assert covered | rest == set(range(3, end))
    real = {b for e in extents for b in range(e.file_offset, e.file_offset + e.nbytes)}
    assert covered == real & set(range(3, end))
