"""Plans under any layouts, against whole tensors and an element-by-element oracle."""

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError, StateLostError
from plexrl.statemanager.bytes.strided_copy import Copier, copy_strided
from plexrl.statemanager.layout.boxes import Box
from plexrl.statemanager.layout.keys import DTYPE_BYTES, StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.plan.balance import PullSource
from plexrl.statemanager.layout.plan.cache import PlanCache
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.plan.plan import Plan, make_plan

Tensor = npt.NDArray[np.uint8]
"""Bytes of the elements in its last dimension, so that it stands for any dtype."""

RANKS_MAX = 8


def window(piece: StateSlice) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.shape, strict=True))


def laid_out(boxes: Sequence[tuple[str, str, tuple[int, ...], Box]]) -> tuple[StateSlice, ...]:
    """Slices in a row in one memory, as a worker lays them out."""
    slices, end = [], 64
    for name, dtype, shape, box in boxes:
        slices.append(
            StateSlice(
                key=StateKey(part=StatePart.PARAMETER, name=name),
                dtype=dtype,
                global_shape=shape,
                offset=box.offset,
                shape=box.shape,
                arena_offset=end,
            )
        )
        end += -(-slices[-1].nbytes // 64) * 64
    return tuple(slices)


def memory_of(
    slices: Sequence[StateSlice], tensors: dict[str, Tensor] | None = None
) -> npt.NDArray[np.uint8]:
    """A rank's memory; what no slice covers is 0xEE."""
    end = max((piece.arena_offset + piece.nbytes for piece in slices), default=0)
    memory = np.full(end + 64, 0xEE, dtype=np.uint8)
    for piece in slices if tensors is not None else ():
        assert tensors is not None
        held = np.ascontiguousarray(tensors[piece.key.name][window(piece)]).reshape(-1)
        memory[piece.arena_offset : piece.arena_offset + piece.nbytes] = held
    return memory


@st.composite
def splits(draw: st.DrawFn, extent: int, ways: int) -> list[tuple[int, int]]:
    """A dimension cut into `ways` parts, uneven and empty ones included."""
    cuts = sorted(draw(st.lists(st.integers(0, extent), min_size=ways - 1, max_size=ways - 1)))
    edges = [0, *cuts, extent]
    if draw(st.booleans()):
        size = -(-extent // ways)
        edges = [min(extent, size * way) for way in range(ways + 1)]
    return list(pairwise(edges))


@st.composite
def shards(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[list[Box]]:
    """What each rank holds of a tensor: sharded along one or two dimensions, replicated, on one
    pipeline stage, with parts that overlap."""
    whole = Box(offset=(0,) * len(shape), shape=shape)
    kind = draw(st.sampled_from(["replicated", "stage", "one", "grid", "overlapping"]))
    if kind == "replicated" or not shape:
        return [[whole] for _ in range(ranks)]
    if kind == "stage":
        home = draw(st.integers(0, ranks - 1))
        return [[whole] if rank == home else [] for rank in range(ranks)]
    dims = draw(st.permutations(range(len(shape))))[: 1 if kind == "one" else 2]
    ways = [draw(st.integers(1, ranks)) for _ in dims]
    if len(dims) == 2:
        ways = [min(ways[0], 4), ranks // min(ways[0], 4) or 1]
    parts = [draw(splits(shape[dim], count)) for dim, count in zip(dims, ways, strict=True)]
    cells = []
    for cell in product(*parts):
        offset, extent = [0] * len(shape), list(shape)
        for dim, (start, end) in zip(dims, cell, strict=True):
            offset[dim], extent[dim] = start, end - start
        cells.append(Box(offset=tuple(offset), shape=tuple(extent)))
    held: list[list[Box]] = [[] for _ in range(ranks)]
    for index in range(max(ranks, len(cells))):
        # More ranks than cells hold replicas; more cells than ranks go around again.
        held[index % ranks].append(cells[index % len(cells)])
    if kind == "overlapping":
        for rank in range(ranks):
            corner = tuple(draw(st.integers(0, length)) for length in shape)
            size = tuple(
                draw(st.integers(0, length - at)) for at, length in zip(corner, shape, strict=True)
            )
            held[rank].append(Box(offset=corner, shape=size))
    return held


Case = tuple[dict[str, Tensor], list[tuple[StateSlice, ...]], list[tuple[StateSlice, ...]]]


@st.composite
def reshardings(draw: st.DrawFn) -> Case:
    """Tensors, what each of the sources holds and what each of the targets wants of them."""
    ranks, targets = draw(st.integers(1, RANKS_MAX)), draw(st.integers(1, RANKS_MAX))
    sources: list[list[tuple[str, str, tuple[int, ...], Box]]] = [[] for _ in range(ranks)]
    wants: list[list[tuple[str, str, tuple[int, ...], Box]]] = [[] for _ in range(targets)]
    tensors = {}
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    for index in range(draw(st.integers(1, 4))):
        name, dtype = f"w{index}", draw(st.sampled_from(["F32", "BF16", "U8", "I64"]))
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        tensors[name] = random.integers(0, 256, (*shape, DTYPE_BYTES[dtype]), dtype=np.uint8)
        for rank, boxes in enumerate(draw(shards(shape, ranks))):
            sources[rank] += [(name, dtype, shape, box) for box in boxes]
        for rank, boxes in enumerate(draw(shards(shape, targets))):
            wants[rank] += [(name, dtype, shape, box) for box in boxes]
    return tensors, [laid_out(held) for held in sources], [laid_out(want) for want in wants]


def planned(held: Sequence[Sequence[StateSlice]], wants: Sequence[Sequence[StateSlice]]) -> Plan:
    return make_plan(
        [PullSource(id=str(rank), layout=Layout.of(slices)) for rank, slices in enumerate(held)],
        [Layout.of(slices) for slices in wants],
    )


@given(reshardings())
def test_every_rank_of_another_layout_gets_each_of_its_bytes_once(case: Case) -> None:
    tensors, held, wants = case
    plan = planned(held, wants)
    memories = [memory_of(slices, tensors) for slices in held]
    for target, slices in enumerate(wants):
        memory = memory_of(slices)
        for source, copies in plan.targets[target].copies.items():
            copy_strided(memories[source], memory, copies)
        assert np.array_equal(memory, memory_of(slices, tensors))
        assert plan.targets[target].nbytes == sum(piece.nbytes for piece in slices)


def box(*spans: tuple[int, int]) -> Box:
    return Box(offset=tuple(a for a, _ in spans), shape=tuple(b - a for a, b in spans))


def slices_of(shape: tuple[int, ...], *boxes: Box, dtype: str = "F32") -> tuple[StateSlice, ...]:
    return laid_out([(f"w{index}", dtype, shape, held) for index, held in enumerate(boxes)])


def test_replicas_share_the_work_by_accumulated_latency() -> None:
    whole = slices_of((8, 8), *[box((0, 8), (0, 8))] * 12)
    plan = planned([whole, whole, whole], [whole])
    given = [plan.targets[0].copies[source].nbytes for source in range(3)]
    assert given == [4 * 256] * 3
    slow = PullSource(id="far", layout=Layout.of(whole), bytes_per_s=1e9)
    fast = PullSource(id="near", layout=Layout.of(whole), bytes_per_s=5e9)
    plan = make_plan([slow, fast], [Layout.of(whole)])
    assert [plan.targets[0].copies[source].nbytes // 256 for source in (0, 1)] == [2, 10]


def test_shards_behind_one_link_count_as_one_source_of_work() -> None:
    whole = Layout.of(slices_of((8, 8), *[box((0, 8), (0, 8))] * 12))
    sources = [
        PullSource(id=str(index), layout=whole, link=f"node{index // 2}") for index in (0, 1, 2)
    ]
    plan = make_plan(sources, [whole])
    by_source = {index: copies.nbytes for index, copies in plan.targets[0].copies.items()}
    assert by_source.get(0, 0) + by_source.get(1, 0) == by_source[2] == 6 * 256


def test_neighbours_on_both_sides_become_one_run() -> None:
    rows = slices_of((64, 16), *[box((0, 64), (0, 16))] * 4)
    [copies] = planned([rows], [rows]).targets[0].copies.values()
    assert (copies.src_offsets.tolist(), copies.items.tolist()) == ([64], [4 * 64 * 16 * 4])
    columns = slices_of((64, 16), box((0, 64), (4, 8)))
    [copies] = planned([rows], [columns]).targets[0].copies.values()
    assert (copies.items.tolist(), copies.counts.tolist(), copies.src_strides.tolist()) == (
        [16],
        [64],
        [64],
    )


def test_a_gap_between_the_shards_is_named() -> None:
    held = [slices_of((4, 2), box((0, 1), (0, 2))), slices_of((4, 2), box((2, 4), (0, 2)))]
    with pytest.raises(StateLostError, match="no shard holds all of w0: 2 elements") as caught:
        planned(held, [slices_of((4, 2), box((0, 4), (0, 2)))])
    assert caught.value.details == {"key": "w0"}
    grid = [slices_of((4, 4), box((0, 2), (0, 2))), slices_of((4, 4), box((2, 4), (0, 4)))]
    with pytest.raises(StateLostError, match="no shard holds all of w0: 4 elements"):
        planned(grid, [slices_of((4, 4), box((0, 4), (0, 4)))])
    with pytest.raises(StateLostError, match="no shard holds all of w0: 8 elements"):
        planned([], [slices_of((4, 2), box((0, 4), (0, 2)))])


def test_another_models_tensor_is_refused() -> None:
    want = slices_of((4, 2), box((0, 4), (0, 2)))
    with pytest.raises(InvalidRequestError, match=r"w0 has the shape \[5, 2\] at one rank"):
        planned([slices_of((5, 2), box((0, 5), (0, 2)))], [want])
    with pytest.raises(InvalidRequestError, match="held as I32 and wanted as F32; that cast"):
        planned([slices_of((4, 2), box((0, 4), (0, 2)), dtype="I32")], [want])
    halves = [
        slices_of((4, 2), box((0, 2), (0, 2))),
        slices_of((4, 2), box((2, 4), (0, 2)), dtype="BF16"),
    ]
    with pytest.raises(InvalidRequestError, match="w0 is held in two dtypes"):
        planned(halves, [want])


@given(reshardings())
def test_equal_layouts_have_equal_plans(case: Case) -> None:
    _, held, wants = case
    first, second = planned(held, wants), planned(held, wants)
    for one, other in zip(first.targets, second.targets, strict=True):
        assert one.copies.keys() == other.copies.keys()
        for source in one.copies:
            assert np.array_equal(one.copies[source].src_offsets, other.copies[source].src_offsets)
            assert np.array_equal(one.copies[source].dst_offsets, other.copies[source].dst_offsets)


def test_a_plan_is_made_once_for_equal_layouts_and_the_oldest_is_forgotten() -> None:
    cache = PlanCache(plans_max=2)
    layouts = [Layout.of(slices_of((size, 2), box((0, size), (0, 2)))) for size in (2, 3, 4)]
    plans = [cache.plan([PullSource(id="a", layout=each)], [each]) for each in layouts[:2]]
    again = Layout.of(slices_of((2, 2), box((0, 2), (0, 2))))
    assert cache.plan([PullSource(id="a", layout=again)], [again]) is plans[0]
    cache.plan([PullSource(id="a", layout=layouts[2])], [layouts[2]])
    assert len(cache) == 2
    assert cache.plan([PullSource(id="a", layout=layouts[0])], [layouts[0]]) is plans[0]
    assert cache.plan([PullSource(id="a", layout=layouts[1])], [layouts[1]]) is not plans[1]


def test_large_copies_on_two_threads_are_those_on_one() -> None:
    shape = (3000, 1024)
    rows = [
        slices_of(shape, box((0, 1500), (0, 1024))),
        slices_of(shape, box((1500, 3000), (0, 1024))),
    ]
    want = slices_of(shape, box((0, 3000), (100, 1024)))
    whole = np.random.default_rng(0).integers(0, 256, (*shape, 4), dtype=np.uint8)
    plan = planned(rows, [want])
    memories = [memory_of(slices, {"w0": whole}) for slices in rows]
    memory = memory_of(want)
    copier = Copier(2)
    copier.copy([(memories[at], copies) for at, copies in plan.targets[0].copies.items()], memory)
    copier.close()
    assert np.array_equal(memory, memory_of(want, {"w0": whole}))
