"""The dispatch plan: from a batch to each rank's input, and from ranks' results to one. Pure.

Rows go to data-parallel ranks with even token counts, and there into micro-batches. Tensor and
pipeline ranks of one data rank get the same bytes; context ranks get their chunks of every row.
Each token's result comes from one rank (`Parallelism.output_ranks`) and returns in the order of the
batch, whatever the layout (PlexRL §4.2).

Input of a rank, by layout (T tokens and R rows of the rank, M micro-batches):

- `lengths` int32 `[R]`: lengths of the rank's rows, whole and unpadded.
- `tokens` int32 `[T]` and the batch's per-token arrays float32 `[T]`: row after row.
- `micro_batch_rows` int32 `[M]`, for a backend that packs: the number of rows of each micro-batch.

With context parallelism a row has `2·ceil(length / (2·cp))` of the T slots on each rank, and the
next token of a slot may be on another rank. So the inputs of a slot refer to the token it predicts:

- `tokens` is 0 at padding, `positions` int32 `[T]` is each slot's position in its row;
- `targets` int32 `[T]` is the token after the slot, -1 if the row has none;
- per-token arrays, and the rank's results, hold the target's entry, 0 if there is none;
- `row_mask` float32 `[R]`, if there is a `mask`: its sum over the row's targets, of all ranks;
- `row_log_weight` float32 `[R]`, if there are `prox_logprobs`: the sum of mask · (prox_logprobs -
  logprobs) over the row's targets, of all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plexrl.model.parallelism import Parallelism
from plexrl.router.dispatch.balance import balanced
from plexrl.router.dispatch.context_split import (
    ContextPart,
    context_part,
    index_ranges,
    local_lengths,
)
from plexrl.router.dispatch.micro_batches import packed, packed_count, padded_count
from plexrl.router.dispatch.reductions import row_masks
from plexrl.wire.tensors import Array, Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The rows of one data-parallel rank."""

    rows: Array
    """int64: indices of the rows in the batch, in the order of the rank."""
    micro_batch_rows: tuple[int, ...] | None
    """Number of rows in each micro-batch; None if the backend splits the rows itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """Which rank gets which tokens of one batch, and whose results are used."""

    layout: Parallelism
    lengths: Array
    """int64: lengths of all rows of the batch."""
    shards: tuple[Shard, ...]
    """By data-parallel rank."""
    micro_batches: int
    """Number of micro-batches that every rank runs."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch."""
        return int(self.lengths.sum())

    @property
    def is_whole(self) -> bool:
        """Whether every rank with rows has all rows in their order: then a rank's input is the
        batch itself, and its result the batch's."""
        return self.layout.dp == self.layout.cp == 1 and self.shards[0].micro_batch_rows is None

    def part_of(self, rank: int) -> int:
        """Index in `inputs` of a rank's part; ranks that replicate share one part."""
        coordinates = self.layout.coordinates(rank)
        return coordinates.dp * self.layout.cp + coordinates.cp

    def inputs(self, arrays: Arrays) -> list[Arrays]:
        """The parts to send: one for each data rank and, within it, each context rank."""
        if self.layout.cp == 1:
            return [self._whole_rows(arrays, shard) for shard in self.shards]
        per_row: Arrays = {}
        if "mask" in arrays:
            per_row["row_mask"] = row_masks(arrays["mask"], self.lengths).astype(np.float32)
        if "prox_logprobs" in arrays:
            log_weights = arrays["prox_logprobs"].astype(np.float64) - arrays["logprobs"]
            whole = row_masks(arrays["mask"] * log_weights, self.lengths)
            per_row["row_log_weight"] = whole.astype(np.float32)
        return [
            self._chunks(arrays, per_row, shard, cp_rank)
            for shard in self.shards
            for cp_rank in range(self.layout.cp)
        ]

    def join(self, results: Mapping[int, Array]) -> Array:
        """Join per-token results `[T, …]`, by output rank, in the batch's order.

        With context parallelism a row's first entry is 0: no token predicts it.
        """
        some = results[self.layout.output_ranks[0]]
        joined = np.zeros((self.tokens, *some.shape[1:]), dtype=some.dtype)
        for rank in self.layout.output_ranks:
            coordinates = self.layout.coordinates(rank)
            shard = self.shards[coordinates.dp]
            if self.layout.cp == 1:
                joined[self._token_index(shard)] = results[rank]
            else:
                part = self._context_part(shard, coordinates.cp)
                predicts = part.target_index >= 0
                joined[part.target_index[predicts]] = results[rank][predicts]
        return joined

    def join_rows(self, results: Mapping[int, Array]) -> Array:
        """Join per-row results, by output rank, in the batch's order. float32 `[R]`.

        Each rank returns its rows in its own order; ranks that share rows return the same values.
        """
        joined = np.zeros(len(self.lengths), dtype=np.float32)
        for rank in self.layout.output_ranks:
            joined[self.shards[self.layout.coordinates(rank).dp].rows] = results[rank]
        return joined

    def _whole_rows(self, arrays: Arrays, shard: Shard) -> Arrays:
        index = self._token_index(shard)
        part = {name: array[index] for name, array in arrays.items() if name != "lengths"}
        return part | self._rows(shard)

    def _chunks(self, arrays: Arrays, per_row: Arrays, shard: Shard, cp_rank: int) -> Arrays:
        mine = self._context_part(shard, cp_rank)
        has_target = mine.target_index >= 0
        # Index -1 reads the batch's last token, which is then replaced.
        part = {
            name: np.where(has_target, array[mine.target_index], 0).astype(array.dtype)
            for name, array in arrays.items()
            if name not in ("tokens", "lengths")
        }
        tokens = arrays["tokens"]
        own, target = tokens[mine.token_index], tokens[mine.target_index]
        part["tokens"] = np.where(mine.token_index >= 0, own, 0).astype(np.int32)
        part["targets"] = np.where(has_target, target, -1).astype(np.int32)
        part["positions"] = mine.positions.astype(np.int32)
        part |= {name: array[shard.rows] for name, array in per_row.items()}
        return part | self._rows(shard)

    def _rows(self, shard: Shard) -> Arrays:
        found: Arrays = {"lengths": self.lengths[shard.rows].astype(np.int32)}
        if shard.micro_batch_rows is not None:
            found["micro_batch_rows"] = np.array(shard.micro_batch_rows, dtype=np.int32)
        return found

    def _token_index(self, shard: Shard) -> Array:
        """Index in the batch of a shard's tokens, in the order of its rows."""
        return index_ranges(self._starts(shard), self.lengths[shard.rows])

    def _context_part(self, shard: Shard, cp_rank: int) -> ContextPart:
        return context_part(self._starts(shard), self.lengths[shard.rows], self.layout.cp, cp_rank)

    def _starts(self, shard: Shard) -> Array:
        starts: Array = (np.cumsum(self.lengths) - self.lengths)[shard.rows]
        return starts


def plan_batch(
    layout: Parallelism, lengths: Sequence[int], *, micro_batch_tokens: int, packs: bool
) -> DispatchPlan:
    """Plan a batch with rows of these lengths, each at least 1. Deterministic.

    `micro_batch_tokens` bounds the tokens, padding included, that one rank runs through the model
    at once; `packs` is whether the backend concatenates rows rather than padding them side by side.
    """
    # Context chunks are cut from single rows, and padded rows would not align.
    # The chunks of a context rank are those of single rows: side by side they would not line up.
    assert packs or layout.cp == 1
    whole = np.array(lengths, dtype=np.int64)
    costs = local_lengths(whole, layout.cp)
    rows = [np.array(part, dtype=np.int64) for part in balanced(costs.tolist(), layout.dp)]
    if not packs:
        count = max(padded_count(costs[part], micro_batch_tokens) for part in rows)
        shards = [Shard(rows=part, micro_batch_rows=None) for part in rows]
    else:
        by_shard = [costs[part].tolist() for part in rows]
        count = max(packed_count(shard, micro_batch_tokens) for shard in by_shard)
        shards = [
            _packed_shard(part, packed(shard, count, micro_batch_tokens))
            for part, shard in zip(rows, by_shard, strict=True)
        ]
    return DispatchPlan(layout=layout, lengths=whole, shards=tuple(shards), micro_batches=count)


def _packed_shard(rows: Array, groups: list[list[int]]) -> Shard:
    order = np.array([index for group in groups for index in group], dtype=np.int64)
    return Shard(rows=rows[order], micro_batch_rows=tuple(len(group) for group in groups))
