"""Canonical keys: they identify state by its content, not by where a rank keeps it.

A `StateKey` is the logical name of a deployment's tensor; a `StateSlice` is the box of that tensor
that one rank holds. With a version they identify bytes across ranks, layouts, nodes and tiers
(PlexRL §4.5.2).
"""

import math
from dataclasses import dataclass
from enum import StrEnum


class StatePart(StrEnum):
    """The role of a tensor; a move names the parts that it includes."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StateKey:
    """A logical tensor of a deployment."""

    part: StatePart
    name: str
    """The parameter's fully qualified name in the Hugging Face model; optimizer state
    adds its slot (`model.norm.weight/exp_avg`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlice:
    """A rank's box of one tensor, and its offset in the rank's arena. Elements are row-major."""

    key: StateKey
    dtype: str
    """The dtype's safetensors name: `F32`, `BF16`, `I64`, …"""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """First index of the box in every dimension of the global tensor."""
    shape: tuple[int, ...]
    """Extent of the box; a rank may hold an empty one."""
    arena_offset: int
    """Bytes from the start of the arena, aligned to `ARENA_ALIGNMENT`."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


ARENA_ALIGNMENT = 64

DTYPE_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
