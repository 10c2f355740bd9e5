"""Canonical keys: what a piece of state *is*, never where a rank happens to keep it.

A `StateKey` names a tensor of a deployment by its logical name; a `StateSlice` is the box of that
tensor which one rank holds. Together with a version they identify bytes across ranks, layouts,
nodes and tiers (PlexRL §4.5.2).
"""

import math
from dataclasses import dataclass
from enum import StrEnum


class StatePart(StrEnum):
    """What role a tensor plays; moves name the parts they take along."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StateKey:
    """A logical tensor of a deployment."""

    part: StatePart
    name: str
    """The parameter's fully qualified name in the Hugging Face model; for optimizer state with the
    slot behind it (`model.norm.weight/exp_avg`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlice:
    """A rank's box of one tensor, and where in the rank's arena its bytes lie (row-major)."""

    key: StateKey
    dtype: str
    """As safetensors spells it: `F32`, `BF16`, `I64`, …"""
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
