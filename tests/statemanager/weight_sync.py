"""Ranks of a trainer and a rollout, with real arenas and daemons, for tests of weight sync."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.reports import PullReport
from plexrl.statemanager.layout.keys import DTYPE_BYTES, StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.network import Network
from tests.statemanager.conftest import DEADLINE_S, NETWORK, Daemon

Box = tuple[slice, ...]
Words = npt.NDArray[np.uint32]

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (512, 96),
    "experts": (8, 64, 48),
    "norm": (96,),
    "scale": (),
}


def weights(version: int) -> dict[str, npt.NDArray[np.float32]]:
    """A model's parameters after `version` steps."""
    random = np.random.default_rng(version)
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()
    }


def whole(name: str) -> Box:
    return tuple(slice(0, extent) for extent in SHAPES[name])


def part(name: str, dim: int, index: int, ways: int) -> Box:
    """The `index`-th of `ways` parts of a tensor along a dimension."""
    window = list(whole(name))
    size = -(-SHAPES[name][dim] // ways)
    window[dim] = slice(size * index, min(SHAPES[name][dim], size * (index + 1)))
    return tuple(window)


def slices_of(boxes: Sequence[tuple[str, Box]], dtype: str) -> tuple[StateSlice, ...]:
    found, end = [], 0
    for name, window in boxes:
        found.append(
            StateSlice(
                key=StateKey(part=StatePart.PARAMETER, name=name),
                dtype=dtype,
                global_shape=SHAPES[name],
                offset=tuple(span.start for span in window),
                shape=tuple(span.stop - span.start for span in window),
                arena_offset=end,
            )
        )
        end += -(-found[-1].nbytes // 64) * 64
    return tuple(found)


SERVING_TCP = {"serve_tcp": "127.0.0.1:0"}
"""Of a daemon that serves other nodes."""


class Rank:
    """One rank; its arena holds boxes of the model's tensors."""

    def __init__(
        self,
        daemon: Daemon,
        deployment: str,
        rank: int,
        boxes: Sequence[tuple[str, Box]],
        *,
        dtype: str = "F32",
        world_size: int = 8,
        timeout_s: float = DEADLINE_S,
        network: Network = NETWORK,
    ) -> None:
        self.daemon, self.boxes, self.dtype = daemon, boxes, dtype
        self.slices = slices_of(boxes, dtype)
        self.arena = Arena(max(piece.arena_offset + piece.nbytes for piece in self.slices))
        self.client = StateManagerClient(
            daemon.config.listen,
            deployment=deployment,
            rank=rank,
            world_size=world_size,
            ticket=daemon.worker_ticket(deployment, rank, world_size),
            timeout_s=timeout_s,
            network=network,
        )
        self.client.register(self.arena, self.slices, group=deployment, token=1)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.slices)

    def bits(self, piece: StateSlice) -> npt.NDArray[np.generic]:
        """One slice, as unsigned integers."""
        memory = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        flat = memory[piece.arena_offset : piece.arena_offset + piece.nbytes]
        return flat.view(f"u{DTYPE_BYTES[piece.dtype]}").reshape(piece.shape)

    def fill(self, version: int) -> None:
        values = weights(version)
        for piece, (name, window) in zip(self.slices, self.boxes, strict=True):
            self.bits(piece)[...] = values[name][window].view(np.uint32)

    def publish(self, version: int) -> None:
        self.fill(version)
        self.client.publish(seq=version, token=1)

    def pull(self, sources: Sequence[str], version: int, source: str = "job/actor") -> PullReport:
        return self.client.pull(sources=sources, source=source, seq=version, wants=self.slices)

    def holds(self, version: int) -> bool:
        """Bit for bit, in this rank's dtype."""
        values = weights(version)
        for piece, (name, window) in zip(self.slices, self.boxes, strict=True):
            expected = np.array(values[name][window], order="C").view(np.uint32)
            if self.dtype == "BF16":
                # Round to nearest, ties to even, on the bits.
                rounded = expected + 0x7FFF + ((expected >> 16) & 1)
                expected = (rounded >> 16).astype(np.uint16)
            if not np.array_equal(self.bits(piece), expected):
                return False
        return True

    def close(self) -> None:
        self.client.close()
        self.arena.close()


def fsdp(rank: int, ways: int) -> list[tuple[str, Box]]:
    """Rows of every tensor, as FSDP shards them; small ones whole."""
    return [
        ("embed", part("embed", 0, rank, ways)),
        ("experts", part("experts", 0, rank, ways)),
        ("norm", part("norm", 0, rank, ways)),
        ("scale", ()),
    ]


def tensor_parallel(rank: int, ways: int) -> list[tuple[str, Box]]:
    """Columns of every matrix, in another order than the trainer's."""
    return [
        ("scale", ()),
        ("norm", whole("norm")),
        ("experts", part("experts", 2, rank, ways)),
        ("embed", part("embed", 1, rank, ways)),
    ]
