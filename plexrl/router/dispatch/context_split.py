"""Which tokens of a row each context-parallel rank works on. Pure.

A row is padded to a multiple of 2·cp and cut into 2·cp equal chunks; rank c gets chunk c and chunk
2·cp-1-c. With causal attention a chunk costs more the later it lies, and the two costs of every
such pair add up to the same (as megatron-core's `get_batch_on_this_cp_rank` does it).

Legend: R rows, L tokens of all rows as one rank has them, padding included.
"""

from dataclasses import dataclass

import numpy as np

from plexrl.wire.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """One context rank's tokens of some rows of a packed batch, row after row. All int64 `[L]`."""

    positions: Array
    """In their rows."""
    places: Array
    """In the batch; -1 at padding."""
    targets: Array
    """Of the tokens after them in the batch, which they predict; -1 where the row has none."""


def context_part(starts: Array, lengths: Array, cp: int, cp_rank: int) -> ContextPart:
    """The part of rows which begin at `starts` in the batch (both int64 `[R]`)."""
    chunks = local_lengths(lengths, cp) // 2
    firsts = np.stack([cp_rank * chunks, (2 * cp - 1 - cp_rank) * chunks], axis=1)
    positions = runs(firsts.ravel(), np.repeat(chunks, 2))
    places = positions + np.repeat(starts, 2 * chunks)
    left = np.repeat(lengths, 2 * chunks) - positions
    return ContextPart(
        positions=positions,
        places=np.where(left > 0, places, -1),
        targets=np.where(left > 1, places + 1, -1),
    )


def local_lengths(lengths: Array, cp: int) -> Array:
    """Tokens of each row on every one of `cp` ranks, padding included. int64."""
    if cp == 1:
        return lengths.astype(np.int64)
    found: Array = -(-lengths.astype(np.int64) // (2 * cp)) * 2
    return found


def runs(starts: Array, lengths: Array) -> Array:
    """The numbers `start` to `start + length - 1` of every pair, end to end. int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    found: Array = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
    found += np.repeat(starts - (ends - lengths), lengths)
    return found
