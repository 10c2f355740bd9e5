"""A micro-batch's rows end to end, as Megatron runs them, and results back to their places.

Shapes: B rows, L tokens of the longest; T tokens of all rows.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from plexrl.worker.batches.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """Where rows lie among the tokens of a micro-batch. Rides in Megatron's `attention_mask`."""

    lengths: tuple[int, ...]
    """Tokens of each row on this rank, and on every other context rank; none is 0."""
    positions_CT: torch.Tensor | None
    """int64: position in its row of every token of each of C context ranks; None for whole rows in
    order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """All int64."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    targets_T: torch.Tensor
    """The token that each place predicts; 0 where its row has none."""
    predicts: torch.Tensor
    """Places of the packed rows that predict a token, in order."""
    homes: torch.Tensor
    """Where in `[B, L]`, flattened, the result of each of `predicts` belongs."""
    shape_BL: tuple[int, int]
    row_map: RowMap

    def unpacked(self, values_T: torch.Tensor) -> torch.Tensor:
        """Results of the places `[B, L]`, 0 where there is none; with a graph."""
        flat = values_T.new_zeros(self.shape_BL[0] * self.shape_BL[1])
        return flat.index_copy(0, self.homes, values_T[self.predicts]).view(self.shape_BL)


def pack_rows(batch: MicroBatch, context_rank: int = 0, context_ranks: int = 1) -> PackedRows:
    """The rows of a micro-batch; one token of padding where it has none."""
    valid_BL = batch.valid_BL
    if not valid_BL.any():
        # Every rank takes part in the collectives of every micro-batch, and none is of nothing.
        valid_BL = torch.zeros_like(valid_BL)
        valid_BL[0, 0] = True
    targets_BL = batch.targets_BL
    if targets_BL is None:
        after_BL = pad(valid_BL[:, 1:], (0, 1))
        targets_BL = torch.where(after_BL, pad(batch.tokens_BL[:, 1:], (0, 1)), -1)
    has_target_BL = valid_BL & (targets_BL >= 0)
    rows_T, columns_T = valid_BL.nonzero(as_tuple=True)
    lengths_B = valid_BL.sum(1)
    if context_ranks == 1:
        positions_CT = columns_T[None]
    else:
        # As `plexrl.router.dispatch.context_split` cuts rows: chunk c, then chunk 2·ranks-1-c, of
        # 2·ranks.
        chunk_T = (lengths_B // 2)[rows_T]
        rank_C1 = torch.arange(context_ranks)[:, None]
        late_C1 = 2 * context_ranks - 2 - rank_C1
        positions_CT = columns_T + chunk_T * torch.where(columns_T < chunk_T, rank_C1, late_C1)
    return PackedRows(
        tokens_T=batch.tokens_BL[valid_BL],
        positions_T=positions_CT[context_rank],
        targets_T=targets_BL[valid_BL].clamp(min=0),
        predicts=has_target_BL[valid_BL].nonzero().squeeze(1),
        # The result of a place is a column further.
        homes=has_target_BL.flatten().nonzero().squeeze(1) + 1,
        shape_BL=(valid_BL.shape[0], valid_BL.shape[1]),
        row_map=RowMap(
            lengths=tuple(length for length in lengths_B.tolist() if length),
            positions_CT=None if context_ranks == 1 else positions_CT,
        ),
    )
