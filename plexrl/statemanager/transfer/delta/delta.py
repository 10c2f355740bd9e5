"""What differs between two versions of the same bytes, block by block. Pure.

A training step of RL changes few elements of the weights as they are served (1 to 3 % in published
copies: small updates vanish in rounding to BF16). So the bytes as they arrive, after any cast, are
compared in small blocks, and of blocks that differ the words that do travel (`delta_codec`). Both
ends cut the same copies into the same batches, so no lengths travel.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.strided_copies import StridedCopies

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

BATCH_BYTES = 256 << 10
"""Compared at a time: two versions of it stay in the processor's cache."""
_WORD_BYTES = 8
_STRIDE_BYTES = _WORD_BYTES * _WORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPolicy:
    """Whether and how a pull brings only what has changed."""

    block_bytes: int = 128
    """Compared at a time; a multiple of 64."""
    changed_max: float = 0.8
    """Where a delta would be a greater fraction of the bytes, they are all sent as they are."""
    only_where_quicker: bool = False
    """Not where the source is in this machine's memory, as comparing takes two to four times as
    long as copying, nor over a network that brought all bytes quicker lately."""

    def __post_init__(self) -> None:
        if self.block_bytes < _STRIDE_BYTES or self.block_bytes % _STRIDE_BYTES:
            raise InvalidRequestError(f"block_bytes is a multiple of {_STRIDE_BYTES}")
        if not 0 <= self.changed_max <= 1:
            raise InvalidRequestError("changed_max is a fraction")


def batches(copies: StridedCopies) -> Iterator[StridedCopies]:
    """The copies as both ends cut them."""
    return copies.batches(BATCH_BYTES)


def changed_blocks(old: Bytes, new: Bytes, block_bytes: int) -> Flags:
    """Whether each block of two memories of one size differs. Exact, and about as fast as memory
    is read."""
    nbytes = len(new)
    whole = nbytes // block_bytes * block_bytes
    count = -(-nbytes // block_bytes)
    flags = np.empty(count, dtype=np.bool_)
    if whole:
        words = old[:whole].view(np.uint64) != new[:whole].view(np.uint64)
        # Eight comparisons, a byte each, are one word.
        eights = words.view(np.uint64)
        per_block = block_bytes // _STRIDE_BYTES
        found = eights[::per_block].copy()
        for step in range(1, per_block):
            found |= eights[step::per_block]
        np.not_equal(found, 0, out=flags[: whole // block_bytes])
    if whole < nbytes:
        flags[-1] = not np.array_equal(old[whole:], new[whole:])
    return flags
