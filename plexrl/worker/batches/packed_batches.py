"""Micro-batches as the router's dispatch plan groups them, for frameworks that pack rows.

With context parallelism a rank has two chunks of every row, and the result at a position is that of
the next token (`plexrl.router.dispatch.plan`). A micro-batch then holds results and loss inputs one
column after the position that they are computed from. As without context parallelism, column 0
never counts.

Shapes: R rows of the rank, B rows of a micro-batch, L tokens of its longest row on this rank, plus
one with context parallelism.
"""

from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import pad

from plexrl.wire.tensors import Array, Arrays
from plexrl.worker.batches.packing import MicroBatch, micro_batches, padded_rows

ROW_SUMS = frozenset({"row_mask", "row_log_weight"})
PER_ROW = frozenset({"lengths", "micro_batch_rows"}) | ROW_SUMS
PER_POSITION = frozenset({"tokens", "positions", "targets"})


def micro_batches_of(arrays: Arrays, count: int, context_ranks: int = 1) -> list[MicroBatch]:
    """The micro-batches of one rank: as the dispatch plan groups them if it does, else `count`."""
    if "micro_batch_rows" in arrays:
        return packed_micro_batches(arrays, context_ranks)
    return micro_batches(arrays, count)


def packed_micro_batches(arrays: Arrays, context_ranks: int) -> list[MicroBatch]:
    """One micro-batch for each entry of `micro_batch_rows`; an empty one has one row of padding.

    `arrays` are those that the dispatch plan sends to a rank of a backend that packs.
    """
    lengths = arrays["lengths"].astype(np.int64)
    if context_ranks > 1:
        lengths = -(-lengths // (2 * context_ranks)) * 2
    starts = np.cumsum(lengths) - lengths
    ends = np.cumsum(arrays["micro_batch_rows"].astype(np.int64))
    others = PER_ROW | PER_POSITION
    per_token = {name: array for name, array in arrays.items() if name not in others}
    found = []
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        rows = slice(int(first), int(end))
        batch = padded_rows(arrays.get("tokens"), lengths[rows], starts[rows], per_token)
        found.append(batch if context_ranks == 1 else _shifted(batch, arrays, rows))
    return found


def _shifted(batch: MicroBatch, arrays: Arrays, rows: slice) -> MicroBatch:
    real = batch.index_BL >= 0
    targets_BL = np.full(batch.index_BL.shape, -1, dtype=np.int64)
    targets_BL[real] = arrays["targets"][batch.index_BL[real]]
    return replace(
        batch,
        tokens_BL=pad(batch.tokens_BL, (0, 1)),
        valid_BL=pad(batch.valid_BL, (0, 1)),
        per_token_BL={name: pad(value, (1, 0)) for name, value in batch.per_token_BL.items()},
        index_BL=_shift_right(batch.index_BL),
        targets_BL=pad(torch.from_numpy(targets_BL), (0, 1), value=-1),
        row_sums_B=_row_sums(arrays, rows),
    )


def _row_sums(arrays: Arrays, rows: slice) -> dict[str, torch.Tensor]:
    if rows.start == rows.stop:
        return {}  # the row of padding has no sums
    return {name: torch.from_numpy(arrays[name][rows].copy()) for name in ROW_SUMS & set(arrays)}


def _shift_right(index_BL: Array) -> Array:
    shifted: Array = np.pad(index_BL, ((0, 0), (1, 0)), constant_values=-1)
    return shifted
