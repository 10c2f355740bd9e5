"""Comparison of two versions of the same bytes, block by block. Pure.

An RL training step changes few elements of the served weights (1 to 3 % in published runs, because
rounding to BF16 removes small updates). So the bytes after any cast are compared in small blocks,
and `delta.codec` sends the words that differ. Both ends split the same copies into the same
batches, so no lengths are sent.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from plexrl.statemanager.layout.plan.columns import Bytes
from plexrl.statemanager.layout.strided.copies import StridedCopies
from plexrl.statemanager.protocol.delta_policy import STRIDE_BYTES

Flags = npt.NDArray[np.bool_]

BATCH_BYTES = 256 << 10
"""Bytes compared at once: both versions fit the CPU cache."""


def batches(copies: StridedCopies) -> Iterator[StridedCopies]:
    """The copies, split into the batches that both ends use."""
    return copies.batches(BATCH_BYTES)


def changed_blocks(old: Bytes, new: Bytes, block_bytes: int) -> Flags:
    """Whether each block differs between two memories of equal size. Exact, at about memory
    bandwidth."""
    nbytes = len(new)
    whole = nbytes // block_bytes * block_bytes
    count = -(-nbytes // block_bytes)
    flags = np.empty(count, dtype=np.bool_)
    if whole:
        words = old[:whole].view(np.uint64) != new[:whole].view(np.uint64)
        # Eight results, one byte each, form one word.
        eights = words.view(np.uint64)
        per_block = block_bytes // STRIDE_BYTES
        found = eights[::per_block].copy()
        for step in range(1, per_block):
            found |= eights[step::per_block]
        np.not_equal(found, 0, out=flags[: whole // block_bytes])
    if whole < nbytes:
        flags[-1] = not np.array_equal(old[whole:], new[whole:])
    return flags
