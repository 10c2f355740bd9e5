"""Context parallelism: which tokens of a row each context rank computes. Pure.

A row is padded to a multiple of 2·cp and cut into 2·cp equal chunks; rank c gets chunk c and chunk
2·cp-1-c. With causal attention a later chunk costs more, and the costs of every such pair have the
same sum (as in megatron-core's `get_batch_on_this_cp_rank`).

Legend: R rows, L tokens of all rows on one rank, padding included.
"""

from dataclasses import dataclass

import numpy as np

from plexrl.wire.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """The tokens of one context rank, row after row of a packed batch. All arrays int64 `[L]`."""

    positions: Array
    """Position of each token in its row."""
    token_index: Array
    """Index of each token in the batch; -1 at padding."""
    target_index: Array
    """Index in the batch of the next token, which is predicted; -1 if the row has none."""


def context_part(starts: Array, lengths: Array, cp: int, cp_rank: int) -> ContextPart:
    """The part of the rows that begin at `starts` in the batch (both int64 `[R]`)."""
    chunks = local_lengths(lengths, cp) // 2
    firsts = np.stack([cp_rank * chunks, (2 * cp - 1 - cp_rank) * chunks], axis=1)
    positions = index_ranges(firsts.ravel(), np.repeat(chunks, 2))
    token_index = positions + np.repeat(starts, 2 * chunks)
    left = np.repeat(lengths, 2 * chunks) - positions
    return ContextPart(
        positions=positions,
        token_index=np.where(left > 0, token_index, -1),
        target_index=np.where(left > 1, token_index + 1, -1),
    )


def local_lengths(lengths: Array, cp: int) -> Array:
    """Number of tokens of each row on every one of `cp` ranks, padding included, int64 `[R]`."""
    if cp == 1:
        return lengths.astype(np.int64)
    found: Array = -(-lengths.astype(np.int64) // (2 * cp)) * 2
    return found


def index_ranges(starts: Array, lengths: Array) -> Array:
    """The numbers `start` to `start + length - 1` of every pair, concatenated. int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    found: Array = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
    found += np.repeat(starts - (ends - lengths), lengths)
    return found
