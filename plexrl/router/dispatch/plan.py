"""The dispatch plan: a batch to what every rank is sent, and the ranks' results back. Pure.

Rows go to data-parallel ranks so that token counts are even, and there into micro-batches. Tensor
and pipeline ranks of one data rank get the same bytes; context ranks get their chunks of every row.
Each token's result is taken from one rank (`Parallelism.output_ranks`) and comes back in the order
of the batch, however the model is laid out (PlexRL §4.2).

What a rank is sent, by layout (T tokens and R rows of its own, M micro-batches):

- `lengths` int32 `[R]`: of its rows, whole and unpadded.
- `tokens` int32 `[T]` and the batch's per-token arrays float32 `[T]`: row after row.
- `micro_batch_rows` int32 `[M]`, for a backend that packs: how many of its rows, in order, each
  micro-batch has.

With context parallelism a row has `2·ceil(length / (2·cp))` of the T places on each rank, and the
token after a place may be on another rank. So a place's inputs speak of the token it predicts:

- `tokens` holds 0 at padding, `positions` int32 `[T]` each place's position in its row;
- `targets` int32 `[T]` is the token after the place, -1 where the row has none;
- per-token arrays hold the target's entry, 0 where there is none, and so do the rank's results;
- `row_mask` float32 `[R]`, where there is a `mask`: its sum over the row's targets, of all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plexrl.model.parallelism import Parallelism
from plexrl.router.dispatch.balance import balanced
from plexrl.router.dispatch.context_split import ContextPart, context_part, local_lengths, runs
from plexrl.router.dispatch.micro_batches import packed, packed_count, padded_count
from plexrl.router.dispatch.reductions import row_masks
from plexrl.wire.tensors import Array, Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The rows of one data-parallel rank."""

    rows: Array
    """int64: their numbers in the batch, in the order the rank has them."""
    micro_batch_rows: tuple[int, ...] | None
    """How many of them each micro-batch has; None where the backend cuts them itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """Who gets which tokens of one batch, and whose results count."""

    layout: Parallelism
    lengths: Array
    """int64: of all rows of the batch."""
    shards: tuple[Shard, ...]
    """By data-parallel rank."""
    micro_batches: int
    """That every rank runs."""

    @property
    def tokens(self) -> int:
        """Of the batch."""
        return int(self.lengths.sum())

    @property
    def is_whole(self) -> bool:
        """Every rank with rows has all of them in their order, so it can be sent the batch as it
        is, and its result is the batch's."""
        return self.layout.dp == self.layout.cp == 1 and self.shards[0].micro_batch_rows is None

    def part_of(self, rank: int) -> int:
        """Which of `inputs` a rank is sent; ranks that replicate share one."""
        places = self.layout.coordinates(rank)
        return places.dp * self.layout.cp + places.cp

    def inputs(self, arrays: Arrays) -> list[Arrays]:
        """What there is to send: a part for each data and, within it, each context rank."""
        if self.layout.cp == 1:
            return [self._whole_rows(arrays, shard) for shard in self.shards]
        per_row: Arrays = {}
        if "mask" in arrays:
            per_row["row_mask"] = row_masks(arrays["mask"], self.lengths).astype(np.float32)
        return [
            self._chunks(arrays, per_row, shard, cp_rank)
            for shard in self.shards
            for cp_rank in range(self.layout.cp)
        ]

    def join(self, results: Mapping[int, Array]) -> Array:
        """Per-token results of the output ranks, by rank, in the batch's own order, float32 `[T]`.

        With context parallelism a row's first entry, which no token predicts, is 0.
        """
        joined = np.zeros(self.tokens, dtype=np.float32)
        for rank in self.layout.output_ranks:
            places = self.layout.coordinates(rank)
            shard = self.shards[places.dp]
            if self.layout.cp == 1:
                joined[self._places(shard)] = results[rank]
            else:
                part = self._context_part(shard, places.cp)
                predicts = part.targets >= 0
                joined[part.targets[predicts]] = results[rank][predicts]
        return joined

    def join_rows(self, results: Mapping[int, Array]) -> Array:
        """One result a row of the output ranks, by rank, in the batch's own order, float32 `[R]`.

        Each rank gives them in the order of its rows; ranks that share rows give the same.
        """
        joined = np.zeros(len(self.lengths), dtype=np.float32)
        for rank in self.layout.output_ranks:
            joined[self.shards[self.layout.coordinates(rank).dp].rows] = results[rank]
        return joined

    def _whole_rows(self, arrays: Arrays, shard: Shard) -> Arrays:
        places = self._places(shard)
        part = {name: array[places] for name, array in arrays.items() if name != "lengths"}
        return part | self._rows(shard)

    def _chunks(self, arrays: Arrays, per_row: Arrays, shard: Shard, cp_rank: int) -> Arrays:
        mine = self._context_part(shard, cp_rank)
        has_target = mine.targets >= 0
        # A place of -1 reads the batch's last token, which is then replaced.
        part = {
            name: np.where(has_target, array[mine.targets], 0).astype(array.dtype)
            for name, array in arrays.items()
            if name not in ("tokens", "lengths")
        }
        tokens = arrays["tokens"]
        part["tokens"] = np.where(mine.places >= 0, tokens[mine.places], 0).astype(np.int32)
        part["targets"] = np.where(has_target, tokens[mine.targets], -1).astype(np.int32)
        part["positions"] = mine.positions.astype(np.int32)
        part |= {name: array[shard.rows] for name, array in per_row.items()}
        return part | self._rows(shard)

    def _rows(self, shard: Shard) -> Arrays:
        found: Arrays = {"lengths": self.lengths[shard.rows].astype(np.int32)}
        if shard.micro_batch_rows is not None:
            found["micro_batch_rows"] = np.array(shard.micro_batch_rows, dtype=np.int32)
        return found

    def _places(self, shard: Shard) -> Array:
        """In the batch, of a shard's tokens, in the order of its rows."""
        return runs(self._starts(shard), self.lengths[shard.rows])

    def _context_part(self, shard: Shard, cp_rank: int) -> ContextPart:
        return context_part(self._starts(shard), self.lengths[shard.rows], self.layout.cp, cp_rank)

    def _starts(self, shard: Shard) -> Array:
        starts: Array = (np.cumsum(self.lengths) - self.lengths)[shard.rows]
        return starts


def plan_batch(
    layout: Parallelism, lengths: Sequence[int], *, micro_batch_tokens: int, packs: bool
) -> DispatchPlan:
    """The plan of a batch with rows of these lengths, each at least 1. Deterministic.

    `micro_batch_tokens` bounds what one rank runs through the model at once, padding included;
    `packs` is whether the backend lays rows end to end rather than padding them side by side.
    """
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
