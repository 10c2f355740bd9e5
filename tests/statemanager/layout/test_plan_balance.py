"""Balance of a plan over its sources, against the best assignment found by brute force."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.statemanager.layout.plan.balance import PullSource, assign
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.plan.match import Matches
from plexrl.statemanager.layout.plan.plan import make_plan
from tests.examples import examples
from tests.statemanager.layout.test_plan import box, slices_of

SOURCES_MAX, PIECES_MAX = 3, 6


def busiest_s(loads: Sequence[float]) -> float:
    return max(loads, default=0.0)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """Bytes of each piece, the sources that hold it, and the number of sources."""
    sources = draw(st.integers(1, SOURCES_MAX))
    sizes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=PIECES_MAX))
    holders = [
        sorted(draw(st.sets(st.integers(0, sources - 1), min_size=1, max_size=sources)))
        for _ in sizes
    ]
    return sizes, holders, sources


def loads_of(sizes: Sequence[int], chosen: Sequence[int], sources: int) -> list[float]:
    loads = [0.0] * sources
    for size, source in zip(sizes, chosen, strict=True):
        loads[source] += size
    return loads


def assigned(
    sizes: list[int], holders: list[list[int]], sources: Sequence[PullSource]
) -> list[int]:
    """The source that `assign` gives to each piece; every source is one held row."""
    count = np.array([len(each) for each in holders])
    first = np.cumsum(count) - count
    boxes = np.zeros((len(sizes), 1), dtype=np.int64)
    matches = Matches(
        wants=np.arange(len(sizes)),
        offsets=boxes,
        shapes=boxes + np.array(sizes)[:, None],
        first=first,
        count=count,
        holders=np.array([row for each in holders for row in each]),
        missing={},
    )
    chosen: list[int] = assign(matches, np.array(sizes), np.arange(len(sources)), sources).tolist()
    return chosen


def alike(count: int) -> list[PullSource]:
    nothing = Layout.of(())
    return [PullSource(id=str(index), layout=nothing, bytes_per_s=1.0) for index in range(count)]


@settings(max_examples=examples(300))
@given(pieces())
def test_the_busiest_source_is_within_the_greedy_bound_of_the_optimum(
    case: tuple[list[int], list[list[int]], int],
) -> None:
    sizes, holders, sources = case
    chosen = assigned(sizes, holders, alike(sources))
    assert all(source in each for source, each in zip(chosen, holders, strict=True))
    best_s = min(busiest_s(loads_of(sizes, found, sources)) for found in product(*holders))
    # A piece goes to its least loaded holder, in any order of pieces: at most
    # 1 + ceil(log2(sources)) times the optimum (Azar, Naor and Rom 1995).
    assert (
        busiest_s(loads_of(sizes, chosen, sources))
        <= (1 + np.ceil(np.log2(sources))) * best_s + 1e-9
    )


@settings(max_examples=examples(300))
@given(st.lists(st.integers(1, 100), min_size=1, max_size=PIECES_MAX), st.integers(1, SOURCES_MAX))
def test_full_replicas_are_within_a_third_of_the_optimum(sizes: list[int], sources: int) -> None:
    everywhere = [list(range(sources))] * len(sizes)
    chosen = assigned(sizes, everywhere, alike(sources))
    best_s = min(busiest_s(loads_of(sizes, found, sources)) for found in product(*everywhere))
    # Longest processing time first (Graham 1969).
    bound_s = (4 / 3 - 1 / (3 * sources)) * best_s
    assert busiest_s(loads_of(sizes, chosen, sources)) <= bound_s + 1e-9


@settings(max_examples=examples(100))
@given(
    st.integers(1, SOURCES_MAX),
    st.integers(1, SOURCES_MAX),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.floats(0.5, 20.0),
)
def test_each_byte_is_sent_once_whatever_the_sources_speeds(
    replicas: int, targets: int, rows: list[int], speed: float
) -> None:
    held = slices_of((400, 64), *[box((0, count), (0, 64)) for count in rows])
    sources = [
        PullSource(id=str(index), layout=Layout.of(held), bytes_per_s=1e9 * speed**index)
        for index in range(replicas)
    ]
    plan = make_plan(sources, [Layout.of(held)] * targets)
    wanted = sum(piece.nbytes for piece in held)
    for target in plan.targets:
        assert sum(copies.nbytes for copies in target.copies.values()) == wanted == target.nbytes
        covered = np.zeros(max(piece.arena_offset + piece.nbytes for piece in held), dtype=np.int8)
        for copies in target.copies.values():
            for start, size, repeats, stride in zip(
                copies.dst_offsets, copies.items, copies.counts, copies.dst_strides, strict=True
            ):
                for index in range(repeats):
                    covered[start + index * stride : start + index * stride + size] += 1
        assert covered.max() == 1
        assert int(covered.sum()) == wanted


def test_of_sources_that_are_done_at_the_same_time_the_first_one_sends() -> None:
    assert assigned([10], [[0, 1, 2]], alike(3)) == [0]
    assert assigned([10], [[2, 1, 0]], alike(3)) == [0]
