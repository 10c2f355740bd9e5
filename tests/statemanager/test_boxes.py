"""Box arithmetic and pull plans, against numpy on whole tensors."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import StateLostError
from plexrl.statemanager.boxes import Box, difference, intersection, plan_pull
from plexrl.statemanager.copy import copy_box
from plexrl.statemanager.keys import DTYPE_BYTES, StateKey, StatePart, StateSlice

KEY = StateKey(part=StatePart.PARAMETER, name="w")


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


def slice_of(shape: tuple[int, ...], box: Box, dtype: str = "F32") -> StateSlice:
    return StateSlice(
        key=KEY,
        dtype=dtype,
        global_shape=shape,
        offset=box.offset,
        shape=box.shape,
        arena_offset=64,
    )


@st.composite
def cut(draw: st.DrawFn, box: Box) -> list[Box]:
    """A box cut into disjoint boxes, any way that straight cuts allow."""
    cuttable = [dim for dim, extent in enumerate(box.shape) if extent > 1]
    if not cuttable or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(cuttable))
    at = draw(st.integers(1, box.shape[dim] - 1))
    low, high = list(box.shape), list(box.shape)
    low[dim], high[dim] = at, box.shape[dim] - at
    start = list(box.offset)
    start[dim] += at
    return [
        *draw(cut(Box(offset=box.offset, shape=tuple(low)))),
        *draw(cut(Box(offset=tuple(start), shape=tuple(high)))),
    ]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], str, list[Box], Box]:
    """A tensor, its shards under some layout with replicas among them, and a wanted box."""
    shape = draw(shapes())
    whole = Box(offset=(0,) * len(shape), shape=shape)
    pieces = draw(cut(whole))
    replicas = draw(st.lists(boxes_in(shape), max_size=3))
    shards = draw(st.permutations([*pieces, *replicas]))
    return shape, draw(st.sampled_from(sorted(DTYPE_BYTES))), shards, draw(boxes_in(shape))


@given(layouts())
def test_a_pull_brings_every_wanted_byte_once_under_any_layout(
    case: tuple[tuple[int, ...], str, list[Box], Box],
) -> None:
    shape, dtype, shards, wanted = case
    width = DTYPE_BYTES[dtype]
    elements = math.prod(shape)
    tensor = np.arange(1, elements * width + 1, dtype=np.uint8).view(f"u{width}").reshape(shape)
    slices = [slice_of(shape, box, dtype) for box in shards]
    memories = []
    for box in shards:
        memory = np.zeros(64 + box.size * width, dtype=np.uint8)
        memory[64:] = np.ascontiguousarray(tensor[window(box)]).reshape(-1).view(np.uint8)
        memories.append(memory)
    want = slice_of(shape, wanted, dtype)

    transfers = plan_pull([want], [[piece] for piece in slices])

    assert sum(transfer.nbytes for transfer in transfers) == want.nbytes
    target = np.zeros(64 + want.nbytes, dtype=np.uint8)
    for transfer in transfers:
        copy_box(transfer, memories[transfer.shard], target)
    expected = np.ascontiguousarray(tensor[window(wanted)]).reshape(-1).view(np.uint8)
    assert np.array_equal(target[64:], expected)
    assert not target[:64].any()


def test_a_gap_between_the_shards_is_named() -> None:
    low = slice_of((4, 2), Box(offset=(0, 0), shape=(1, 2)))
    high = slice_of((4, 2), Box(offset=(2, 0), shape=(2, 2)))
    want = slice_of((4, 2), Box(offset=(0, 0), shape=(4, 2)))
    with pytest.raises(StateLostError, match="no shard holds all of w: 2 elements") as caught:
        plan_pull([want], [[low], [high]])
    assert caught.value.details == {"key": "w"}


@pytest.mark.parametrize("change", [{"dtype": "BF16"}, {"global_shape": (5, 2)}])
def test_another_models_tensor_is_refused(change: dict[str, object]) -> None:
    want = slice_of((4, 2), Box(offset=(0, 0), shape=(4, 2)))
    other = replace(want, **change)  # type: ignore[arg-type]  # one field or the other
    with pytest.raises(StateLostError, match="use the same model"):
        plan_pull([want], [[other]])
