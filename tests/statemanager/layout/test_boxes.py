"""Box arithmetic, against numpy on whole tensors."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from plexrl.statemanager.layout.boxes import Box, difference, intersection


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box of a tensor, empty ones included."""
    offset = tuple(draw(st.integers(0, extent)) for extent in shape)
    inner = tuple(
        draw(st.integers(0, extent - start)) for start, extent in zip(offset, shape, strict=True)
    )
    return Box(offset=offset, shape=inner)


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(shapes())
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


def mask(shape: tuple[int, ...], box: Box) -> npt.NDArray[np.bool_]:
    covered = np.zeros(shape, dtype=np.bool_)
    covered[window(box)] = True
    return covered


def window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))


@given(box_pairs())
def test_an_intersection_is_what_both_cover(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    common = intersection(a, b)
    expected = mask(shape, a) & mask(shape, b)
    found = np.zeros_like(expected) if common is None else mask(shape, common)
    assert np.array_equal(found, expected)


@given(box_pairs())
def test_a_difference_covers_the_rest_once(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    common = intersection(a, b)
    if common is None:
        return
    covered = np.zeros(shape, dtype=int)
    for box in difference(a, common):
        assert box.size > 0
        covered[window(box)] += 1
    assert np.array_equal(covered, (mask(shape, a) & ~mask(shape, common)).astype(int))
