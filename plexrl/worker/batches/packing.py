"""Converts packed ragged batches to padded micro-batches, and results back to packed order.

Shapes: T tokens of all rows end to end, R rows, B rows of a micro-batch, L its longest row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from plexrl.wire.tensors import Array, Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of similar length, padded on the right."""

    tokens_BL: torch.Tensor
    """int64."""
    valid_BL: torch.Tensor
    """bool: True for tokens, False for padding."""
    per_token_BL: dict[str, torch.Tensor]
    """float32, 0 at padding."""
    index_BL: Array
    """int64: index of each token in the packed order; -1 at padding."""
    targets_BL: torch.Tensor | None = None
    """int64: the token that each position predicts, whose result is in the next column; -1: none.
    Absent for whole rows, where it is the token of the next column."""
    row_sums_B: dict[str, torch.Tensor] = field(default_factory=dict)
    """float32: sums over each row, over all ranks that share the row, by the names in
    `packed_batches.ROW_SUMS`. Empty for whole rows, or if there is no mask."""

    host: "MicroBatch | None" = None
    """The same batch on the CPU; absent: this one is there."""

    @property
    def on_host(self) -> "MicroBatch":
        """The same batch on the CPU."""
        return self.host or self

    @property
    def rows(self) -> int:
        return self.tokens_BL.shape[0]

    def placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """The same batch with all tensors where `place` puts them."""
        return replace(
            self,
            tokens_BL=place(self.tokens_BL),
            valid_BL=place(self.valid_BL),
            per_token_BL={name: place(each) for name, each in self.per_token_BL.items()},
            targets_BL=None if self.targets_BL is None else place(self.targets_BL),
            row_sums_B={name: place(each) for name, each in self.row_sums_B.items()},
            host=self.on_host,
        )

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Arguments of a `transformers` model."""
        return {
            "input_ids": self.tokens_BL,
            "attention_mask": self.valid_BL.long(),
            "use_cache": False,
        }


def micro_batches(arrays: Arrays, count: int) -> list[MicroBatch]:
    """Exactly `count` micro-batches of rows sorted by length; an empty one has one row of padding.

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


def unpack(batches: list[MicroBatch], values: Sequence[torch.Tensor], tokens: int) -> Array:
    """Per-token values `[B, L, …]` of each micro-batch as one packed float32 `[T, …]` array."""
    packed = np.zeros((tokens, *values[0].shape[2:]), dtype=np.float32)
    for batch, value_BL in zip(batches, values, strict=True):
        real = batch.index_BL >= 0
        packed[batch.index_BL[real]] = value_BL.numpy()[real]
    return packed


def unpack_named(
    batches: list[MicroBatch], values: Sequence[Mapping[str, torch.Tensor]], tokens: int
) -> Arrays:
    """As `unpack`, for values by name; token ids are int32 `[T, …]`."""
    found = {name: unpack(batches, [value[name] for value in values], tokens) for name in values[0]}
    if "top_ids" in found:
        found["top_ids"] = found["top_ids"].astype(np.int32)
    return found


def unpack_rows(arrays: Arrays, values: list[torch.Tensor]) -> Array:
    """Per-row values `[B]` of each micro-batch as one float32 `[R]` array, in the order of rows.

    `arrays` are the arguments of `micro_batches`.
    """
    lengths = arrays.get("lengths", np.empty(0, dtype=np.int32)).astype(np.int64)
    in_order = np.zeros(len(lengths), dtype=np.float32)
    parts = np.array_split(np.argsort(lengths, kind="stable"), len(values))
    for rows, value_B in zip(parts, values, strict=True):
        # An empty micro-batch has one row of padding.
        in_order[rows] = value_B.numpy()[: len(rows)]
    return in_order


def padded_rows(
    tokens: Array | None, lengths: Array, starts: Array, per_token: Mapping[str, Array]
) -> MicroBatch:
    """A micro-batch of the rows that begin at `starts` in packed order; `lengths` are int64."""
    longest = max(2, int(lengths.max()) if len(lengths) else 0)
    rows = max(1, len(lengths))
    columns = np.arange(longest)
    index = np.full((rows, longest), -1, dtype=np.int64)
    if len(lengths):
        inside = columns[None, :] < lengths[:, None]
        index = np.where(inside, starts[:, None] + columns[None, :], -1)
    real = index >= 0
    padded = np.zeros((rows, longest), dtype=np.int64)
    if tokens is not None:
        padded[real] = tokens[index[real]]
    extra = {}
    for name, array in per_token.items():
        filled = np.zeros((rows, longest), dtype=np.float32)
        filled[real] = array[index[real]]
        extra[name] = torch.from_numpy(filled)
    return MicroBatch(
        tokens_BL=torch.from_numpy(padded),
        valid_BL=torch.from_numpy(real),
        per_token_BL=extra,
        index_BL=index,
    )
