"""Versions in memory, cut as ranks would hold them, for what reads versions to make checkpoints."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from plexrl.statemanager.bytes.strided_copy import copy_strided
from plexrl.statemanager.layout.boxes import Box
from plexrl.statemanager.layout.keys import DTYPE_BYTES, StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.plan.columns import Bytes
from plexrl.statemanager.layout.strided.copies import StridedCopies
from plexrl.statemanager.layout.versions import Manifest, VersionKind, padded
from plexrl.statemanager.store.receiving.reader import Arrived, Delta, HeldState
from plexrl.statemanager.store.tiers.eviction.policy import TierName

Tensors = dict[StateKey, tuple[str, npt.NDArray[np.generic]]]
"""Dtype and values, as unsigned integers of the dtype's size."""
Cut = dict[StateKey, Box]
"""What one rank holds."""


class MemoryReader(HeldState):
    """A rank's version as bytes, as a `StateReader`."""

    address = ""
    bytes_per_s = 1e9
    request_s = 0.0
    arrives_whole = True
    tier = TierName.HOST
    mapped = None

    def __init__(self, manifest: Manifest, slices: Sequence[StateSlice], data: bytearray) -> None:
        super().__init__(manifest)
        self.slices = slices
        self.data = data
        self.closed = False

    def read(
        self,
        copies: StridedCopies,
        target: Bytes,
        arrived: Arrived | None = None,
        delta: Delta | None = None,
    ) -> None:
        assert not self.closed
        assert arrived is None
        assert delta is None
        copy_strided(np.frombuffer(self.data, dtype=np.uint8), target, copies)

    def read_data(self, start: int, target: memoryview) -> None:
        assert not self.closed
        assert start + len(target) <= len(self.data)
        target[:] = memoryview(self.data)[start : start + len(target)]

    def confirm(self) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True


def key(name: str, part: StatePart = StatePart.PARAMETER) -> StateKey:
    return StateKey(part=part, name=name)


def random_tensor(
    rng: np.random.Generator, dtype: str, shape: Sequence[int]
) -> tuple[str, npt.NDArray[np.generic]]:
    """Arbitrary bits."""
    itemsize = DTYPE_BYTES[dtype]
    raw = rng.integers(0, 256, math.prod(shape) * itemsize, dtype=np.uint8)
    return dtype, raw.view(f"u{itemsize}").reshape(tuple(shape))


def rows(tensors: Tensors, ranks: int) -> list[Cut]:
    """Every tensor cut along its first dimension, as FSDP does; replicated where it has none."""
    cuts: list[Cut] = [{} for _ in range(ranks)]
    for name, (_, values) in tensors.items():
        for rank, cut in enumerate(cuts):
            if values.ndim == 0:
                cut[name] = Box(offset=(), shape=())
                continue
            step = -(-values.shape[0] // ranks)
            start = min(rank * step, values.shape[0])
            extent = min(step, values.shape[0] - start)
            cut[name] = Box(
                offset=(start, *(0 for _ in values.shape[1:])), shape=(extent, *values.shape[1:])
            )
    return cuts


def wanted(tensors: Tensors, cut: Cut) -> tuple[StateSlice, ...]:
    """The slices of a cut, laid out in an arena of their own."""
    slices = []
    end = 0
    for name, box in cut.items():
        dtype, values = tensors[name]
        piece = StateSlice(
            key=name,
            dtype=dtype,
            global_shape=values.shape,
            offset=box.offset,
            shape=box.shape,
            arena_offset=end,
        )
        slices.append(piece)
        end += padded(piece.nbytes, 64)
    return tuple(slices)


def part_of(tensors: Tensors, piece: StateSlice) -> bytes:
    """The bytes that a slice has."""
    _, values = tensors[piece.key]
    window = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
    return np.ascontiguousarray(values[window]).tobytes()


def version(
    tensors: Tensors, cut: Cut, *, rank: int = 0, world_size: int = 1, seq: int = 1
) -> MemoryReader:
    """One rank's version."""
    slices = wanted(tensors, cut)
    nbytes = max((piece.arena_offset + piece.nbytes for piece in slices), default=0)
    data = bytearray(nbytes)
    for piece in slices:
        data[piece.arena_offset : piece.arena_offset + piece.nbytes] = part_of(tensors, piece)
    manifest = Manifest(
        deployment="job/actor",
        rank=rank,
        world_size=world_size,
        seq=seq,
        kind=VersionKind.STATE,
        parts=(StatePart.PARAMETER, StatePart.OPTIMIZER),
        meta_json="{}",
        slices=slices,
        extents=(),
        nbytes=nbytes,
        stamp=f"{seq}-{rank}",
    )
    return MemoryReader(manifest, slices, data)


def versions(tensors: Tensors, ranks: int, *, seq: int = 1) -> list[MemoryReader]:
    """All ranks' versions, cut by rows."""
    return [
        version(tensors, cut, rank=rank, world_size=ranks, seq=seq)
        for rank, cut in enumerate(rows(tensors, ranks))
    ]


def with_values(tensors: Tensors, name: StateKey, values: npt.NDArray[np.generic]) -> Tensors:
    return {**tensors, name: (tensors[name][0], values)}


def moved(piece: StateSlice, arena_offset: int) -> StateSlice:
    return replace(piece, arena_offset=arena_offset)
