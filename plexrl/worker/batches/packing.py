"""Packed ragged batches to padded micro-batches, and per-token results back to packed order.

Shapes: T tokens of all rows end to end, R rows, B rows of a micro-batch, L its longest row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from plexrl.wire.tensors import Array, Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of similar length, padded on the right."""

    tokens_BL: torch.Tensor
    """int64."""
    valid_BL: torch.Tensor
    """bool: a token, not padding."""
    per_token_BL: dict[str, torch.Tensor]
    """float32, 0 at padding."""
    places_BL: Array
    """int64: index of each token in the packed order; -1 at padding."""
    targets_BL: torch.Tensor | None = None
    """int64: the token that each place predicts, whose result is a column further; -1 where there
    is none. Absent where rows are whole: it is the token of the next column."""
    row_mask_B: torch.Tensor | None = None
    """float32: the mask's sum over each row's tokens, of all ranks that share the row. Absent where
    rows are whole, or nothing is masked."""

    @property
    def rows(self) -> int:
        return self.tokens_BL.shape[0]


def micro_batches(arrays: Arrays, count: int) -> list[MicroBatch]:
    """Exactly `count` micro-batches, rows sorted by length; an empty one has one row of padding.

    `arrays` holds `tokens` int32 `[T]`, `lengths` int32 `[R]` and float32 `[T]` arrays.
    """
    lengths = arrays.get("lengths", np.empty(0, dtype=np.int32)).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else lengths
    order = np.argsort(lengths, kind="stable")
    per_token = {name: array for name, array in arrays.items() if name not in ("tokens", "lengths")}
    return [
        padded_rows(arrays.get("tokens"), lengths[rows], starts[rows], per_token)
        for rows in np.array_split(order, count)
    ]


def unpack(batches: list[MicroBatch], values: list[torch.Tensor], tokens: int) -> Array:
    """Per-token values `[B, L]` of each micro-batch as one packed float32 `[T]` array."""
    packed = np.zeros(tokens, dtype=np.float32)
    for batch, value_BL in zip(batches, values, strict=True):
        real = batch.places_BL >= 0
        packed[batch.places_BL[real]] = value_BL.numpy()[real]
    return packed


def unpack_rows(arrays: Arrays, values: list[torch.Tensor]) -> Array:
    """One value `[B]` a row of each micro-batch as one float32 `[R]` array, in the rows' order.

    `arrays` are those that `micro_batches` was given.
    """
    lengths = arrays.get("lengths", np.empty(0, dtype=np.int32)).astype(np.int64)
    in_order = np.zeros(len(lengths), dtype=np.float32)
    parts = np.array_split(np.argsort(lengths, kind="stable"), len(values))
    for rows, value_B in zip(parts, values, strict=True):
        # An empty micro-batch has a row of padding.
        in_order[rows] = value_B.numpy()[: len(rows)]
    return in_order


def padded_rows(
    tokens: Array | None, lengths: Array, starts: Array, per_token: Mapping[str, Array]
) -> MicroBatch:
    """A micro-batch of the rows that begin at `starts` of the packed order; `lengths` are int64."""
    longest = max(2, int(lengths.max()) if len(lengths) else 0)
    rows = max(1, len(lengths))
    columns = np.arange(longest)
    places = np.full((rows, longest), -1, dtype=np.int64)
    if len(lengths):
        inside = columns[None, :] < lengths[:, None]
        places = np.where(inside, starts[:, None] + columns[None, :], -1)
    real = places >= 0
    padded = np.zeros((rows, longest), dtype=np.int64)
    if tokens is not None:
        padded[real] = tokens[places[real]]
    extra = {}
    for name, array in per_token.items():
        filled = np.zeros((rows, longest), dtype=np.float32)
        filled[real] = array[places[real]]
        extra[name] = torch.from_numpy(filled)
    return MicroBatch(
        tokens_BL=torch.from_numpy(padded),
        valid_BL=torch.from_numpy(real),
        per_token_BL=extra,
        places_BL=places,
    )
