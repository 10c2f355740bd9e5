"""Loads between any two layouts against copies of whole tensors, which share no code with plans."""

import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import StateLostError
from plexrl.statemanager.bytes.strided_copy import copy_strided
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.layout import lay_out
from plexrl.statemanager.layout.plan.columns import DTYPES
from plexrl.statemanager.layout.staging import StagingBlocks, covered
from plexrl.statemanager.layout.strided.copies import (
    BYTES_CAST,
    StridedCopies,
    concatenate,
)
from plexrl.statemanager.layout.versions import Manifest, VersionKind
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.transfer.relayout_load import Relayouter
from tests.examples import examples
from tests.statemanager.host_memory import HostMemory
from tests.statemanager.relayouts import arena_bytes, box_of, view

NAME = "job/actor"
SHAPES = [(), (7,), (12, 5), (6, 4, 9), (300, 260)]
Box = tuple[slice, ...]


@st.composite
def layouts(draw: st.DrawFn) -> list[list[tuple[int, Box]]]:
    """Per rank, (tensor, box): every tensor cut by a grid of its own, each cell on some ranks."""
    ranks: list[list[tuple[int, Box]]] = [[] for _ in range(draw(st.integers(1, 5)))]
    for tensor, shape in enumerate(SHAPES):
        cells: list[Box] = [()]
        for extent in shape:
            edges = draw(st.lists(st.integers(0, extent), max_size=2))
            marks = [0, *sorted(edges), extent]
            spans = [slice(a, b) for a, b in itertools.pairwise(marks)]
            cells = [(*cell, span) for cell in cells for span in spans]
        for cell in cells:
            holders = draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1, max_size=2))
            for rank in holders:
                ranks[rank].append((tensor, cell))
    return [draw(st.permutations(rank)) for rank in ranks]


def slices_of(held: list[tuple[int, Box]], gap: int) -> tuple[StateSlice, ...]:
    found: list[StateSlice] = []
    end = 0
    for tensor, box in held:
        part = StatePart.OPTIMIZER if tensor % 2 else StatePart.PARAMETER
        found.append(
            StateSlice(
                key=StateKey(part=part, name=f"t{tensor}"),
                dtype="F32",
                global_shape=SHAPES[tensor],
                offset=tuple(span.start for span in box),
                shape=tuple(span.stop - span.start for span in box),
                arena_offset=end,
            )
        )
        end += -(-(found[-1].nbytes + gap) // 64) * 64
    return tuple(found)


def values() -> dict[str, npt.NDArray[np.uint32]]:
    random = np.random.default_rng(0)
    return {
        f"t{index}": random.integers(0, 1 << 32, shape, dtype=np.uint32)
        for index, shape in enumerate(SHAPES)
    }


def put(store: Store, slices: tuple[StateSlice, ...], rank: int, ranks: int) -> None:
    laid = lay_out(slices)
    manifest = Manifest(
        deployment=NAME,
        rank=rank,
        world_size=ranks,
        seq=1,
        kind=VersionKind.STATE,
        parts=(StatePart.OPTIMIZER, StatePart.PARAMETER),
        meta_json="{}",
        slices=slices,
        extents=laid.extents,
        nbytes=laid.nbytes,
        sections=laid.sections,
        token=3,
    )
    arena = Arena(arena_bytes(slices) if slices else 64)
    memory = np.frombuffer(arena.buffer, dtype=np.uint8)
    whole = values()
    for piece in slices:
        view(memory, piece)[...] = whole[piece.key.name][box_of(piece)]
    store.put(manifest, HostMemory(arena))
    del memory
    arena.close()


@settings(deadline=None, max_examples=examples(20))
@given(before=layouts(), after=layouts(), in_host=st.booleans(), lost=st.booleans())
def test_any_layout_is_loaded_from_any_other(
    before: list[list[tuple[int, Box]]],
    after: list[list[tuple[int, Box]]],
    in_host: bool,
    lost: bool,
) -> None:
    directory = Path(tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"))
    store = Store(
        StateManagerConfig(
            node="n",
            listen="",
            host_dir=str(directory / "host"),
            host_bytes=32 << 20 if in_host else 1,
            nvme_dir=str(directory / "nvme"),
            nvme_bytes=32 << 20,
        )
    )
    try:
        kept = before[1:] if lost else before
        for rank, held in enumerate(before):
            if held in kept:
                put(store, slices_of(held, 0), rank, len(before))
        relayouter = Relayouter(store)
        whole = values()
        for held in after:
            slices = slices_of(held, 64)
            # By hand, element for element: is all of it on some rank that is left?
            marks = {name: np.zeros(array.shape, bool) for name, array in whole.items()}
            for tensor, box in (one for rank in kept for one in rank):
                marks[f"t{tensor}"][box] = True
            is_there = all(marks[s.key.name][box_of(s)].all() for s in slices)
            arena = Arena(arena_bytes(slices) if slices else 64)
            memory = np.frombuffer(arena.buffer, dtype=np.uint8)
            if not is_there or not kept:
                with pytest.raises(StateLostError):
                    relayouter.load(NAME, 1, slices, HostMemory(arena))
                assert not memory.any()
            else:
                report = relayouter.load(NAME, 1, slices, HostMemory(arena))
                expected = np.zeros_like(memory)
                for piece in slices:
                    view(expected, piece)[...] = whole[piece.key.name][box_of(piece)]
                assert np.array_equal(memory, expected)
                assert report.nbytes == sum(piece.nbytes for piece in slices)
            del memory
            arena.close()
        store.check()
    finally:
        store.close()
        shutil.rmtree(directory)


@st.composite
def some_copies(draw: st.DrawFn) -> StridedCopies:
    """Disjoint at the target, in any order, some cast on the way."""
    rows = []
    at = draw(st.integers(0, 5000)) // 4 * 4
    for _ in range(draw(st.integers(1, 6))):
        pair = draw(st.sampled_from([None, ("F32", "BF16"), ("BF16", "F32")]))
        code = BYTES_CAST
        if pair is not None:
            code = DTYPES.index(pair[0]) * len(DTYPES) + DTYPES.index(pair[1])
        widths = {None: (1, 1), ("F32", "BF16"): (4, 2), ("BF16", "F32"): (2, 4)}[pair]
        items = draw(st.integers(1, 3000)) * (4 if pair is None else 1)
        count = draw(st.integers(1, 5))
        gap = draw(st.integers(0, 1500)) * 4
        steps = [items * width + gap if count > 1 else 0 for width in widths]
        rows.append((draw(st.integers(0, 900)) * 4, at, items, count, *steps, code))
        at += max(1, count) * (items * widths[1] + gap)
        at = -(-at // 4) * 4
    columns = np.array(draw(st.permutations(rows)), dtype=np.int64).T
    names = ("src_offsets", "dst_offsets", "items", "counts", "src_strides", "dst_strides", "casts")
    return StridedCopies(**dict(zip(names, columns, strict=True)))


@settings(deadline=None, max_examples=examples(60))
@given(copies=some_copies(), window=st.sampled_from([4096, 8192, 65536]))
def test_windows_together_bring_what_the_runs_bring(copies: StridedCopies, window: int) -> None:
    ends = copies.dst_offsets + np.maximum(copies.dst_strides, copies.row_bytes()) * copies.counts
    source_ends = (
        copies.src_offsets + copies.src_strides * copies.counts + copies.row_bytes_at_source()
    )
    source = np.random.default_rng(1).integers(0, 256, int(source_ends.max()), dtype=np.uint8)
    # NaNs differ in the casts' eyes only by payload; a number has none.
    source[3::4] &= 0x3F
    source[1::4] &= 0x3F
    expected = np.zeros(int(ends.max()) + window, dtype=np.uint8)
    copy_strided(source, expected, copies)
    found = np.zeros_like(expected)
    there = StagingBlocks(copies, window)
    brought = 0
    for start in there.starts():
        mine = there.copies(start)
        block = np.zeros(window, dtype=np.uint8)
        copy_strided(source, block, mine)
        for at, nbytes in covered(mine):
            found[start + at : start + at + nbytes] = block[at : at + nbytes]
            brought += nbytes
    assert np.array_equal(found, expected)
    assert brought == copies.nbytes == sum(nbytes for _, nbytes in covered(copies))
    assert concatenate([there.copies(at) for at in there.starts()]).nbytes == copies.nbytes
