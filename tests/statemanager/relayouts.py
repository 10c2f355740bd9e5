"""A model's state under layouts of all kinds of parallelism, for tests of loads across layouts."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plexrl.statemanager.layout.keys import ARENA_ALIGNMENT, StateKey, StatePart, StateSlice

Box = tuple[slice, ...]
Held = tuple[StateKey, Box]

LAYERS = 4
SHAPES: dict[StateKey, tuple[int, ...]] = {
    StateKey(part=part, name=name + ("" if part == StatePart.PARAMETER else "/exp_avg")): shape
    for part in (StatePart.PARAMETER, StatePart.OPTIMIZER)
    for name, shape in {
        "embed": (96, 40),
        "scale": (),
        **{f"layers.{layer}.mix": (64, 48) for layer in range(LAYERS)},
        **{f"layers.{layer}.experts": (8, 16, 24) for layer in range(LAYERS)},
        **{f"layers.{layer}.norm": (48,) for layer in range(LAYERS)},
        "big": (512, 700),
    }.items()
}


def state(version: int) -> dict[StateKey, npt.NDArray[np.uint32]]:
    """Bits of every tensor after `version` steps."""
    random = np.random.default_rng(version)
    return {
        key: random.integers(0, 1 << 32, shape, dtype=np.uint32) for key, shape in SHAPES.items()
    }


def whole(key: StateKey) -> Box:
    return tuple(slice(0, extent) for extent in SHAPES[key])


def part_of(key: StateKey, dim: int, index: int, ways: int) -> Box:
    """The `index`-th of `ways` parts along a dimension, the last ones maybe short or empty."""
    box = list(whole(key))
    size = -(-SHAPES[key][dim] // ways)
    limit = SHAPES[key][dim]
    box[dim] = slice(min(limit, size * index), min(limit, size * (index + 1)))
    return tuple(box)


def data_parallel(rank: int, ways: int) -> list[Held]:
    """Everything, on every rank."""
    del rank, ways
    return [(key, whole(key)) for key in SHAPES]


def fsdp(rank: int, ways: int) -> list[Held]:
    """Rows."""
    return [(key, part_of(key, 0, rank, ways) if shape else ()) for key, shape in SHAPES.items()]


def tensor_parallel(rank: int, ways: int) -> list[Held]:
    """Columns, in another order than the others."""
    return [
        (key, part_of(key, len(shape) - 1, rank, ways) if len(shape) > 1 else whole(key))
        for key, shape in reversed(SHAPES.items())
    ]


def pipeline(rank: int, ways: int) -> list[Held]:
    """Layers by stage; what is of no layer with the first stage."""
    found = []
    for key in SHAPES:
        _, _, rest = key.name.partition("layers.")
        layer = int(rest.partition(".")[0]) if rest else 0
        if layer * ways // LAYERS == rank:
            found.append((key, whole(key)))
    return found


def expert_parallel(rank: int, ways: int) -> list[Held]:
    """Experts apart, all else replicated."""
    return [
        (key, part_of(key, 0, rank, ways) if "experts" in key.name else whole(key))
        for key in SHAPES
    ]


LAYOUTS = {
    "data": data_parallel,
    "fsdp": fsdp,
    "tensor": tensor_parallel,
    "pipeline": pipeline,
    "expert": expert_parallel,
}


def slices_of(held: Sequence[Held], gap: int = 0, dtype: str = "F32") -> tuple[StateSlice, ...]:
    """One after the other in an arena, `gap` bytes between them."""
    found: list[StateSlice] = []
    end = 0
    for key, box in held:
        found.append(
            StateSlice(
                key=key,
                dtype=dtype,
                global_shape=SHAPES[key],
                offset=tuple(span.start for span in box),
                shape=tuple(span.stop - span.start for span in box),
                arena_offset=end,
            )
        )
        end += -(-(found[-1].nbytes + gap) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
    return tuple(found)


def arena_bytes(slices: Sequence[StateSlice]) -> int:
    return max(64, *(piece.arena_offset + piece.nbytes for piece in slices))


def view(memory: npt.NDArray[np.uint8], piece: StateSlice) -> npt.NDArray[np.uint32]:
    """One slice in an arena."""
    count = math.prod(piece.shape)
    flat = memory[piece.arena_offset : piece.arena_offset + 4 * count]
    return flat.view(np.uint32).reshape(piece.shape)


def fill(
    memory: npt.NDArray[np.uint8],
    slices: Sequence[StateSlice],
    values: dict[StateKey, npt.NDArray[np.uint32]],
) -> None:
    for piece in slices:
        view(memory, piece)[...] = values[piece.key][box_of(piece)]


def holds(
    memory: npt.NDArray[np.uint8],
    slices: Sequence[StateSlice],
    values: dict[StateKey, npt.NDArray[np.uint32]],
) -> bool:
    """Bit for bit, and nothing else but zeros."""
    expected = np.zeros_like(memory)
    fill(expected, slices, values)
    return bool(np.array_equal(memory, expected))


def box_of(piece: StateSlice) -> Box:
    return tuple(
        slice(start, start + extent)
        for start, extent in zip(piece.offset, piece.shape, strict=True)
    )
