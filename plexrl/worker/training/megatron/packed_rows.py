"""A micro-batch's rows end to end, as Megatron runs them, and results back to their places.

Shapes: B rows, L tokens of the longest; T tokens of all rows.
"""

from dataclasses import dataclass

import torch

from plexrl.worker.packing import MicroBatch
from plexrl.worker.training.megatron.attention import RowMap


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


def pack_rows(batch: MicroBatch) -> PackedRows:
    """The rows of a micro-batch; one token of padding where it has none."""
    valid_BL = batch.valid_BL
    if not valid_BL.any():
        # Every rank takes part in the collectives of every micro-batch, and none is of nothing.
        valid_BL = torch.zeros_like(valid_BL)
        valid_BL[0, 0] = True
    _, columns_T = valid_BL.nonzero(as_tuple=True)
    has_next_BL = torch.nn.functional.pad(valid_BL[:, 1:], (0, 1))
    next_BL = torch.nn.functional.pad(batch.tokens_BL[:, 1:], (0, 1))
    has_next_T = has_next_BL[valid_BL]
    # The token after a place is the one that its result is of.
    homes = has_next_BL.flatten().nonzero().squeeze(1) + 1
    return PackedRows(
        tokens_T=batch.tokens_BL[valid_BL],
        positions_T=columns_T,
        targets_T=torch.where(has_next_T, next_BL[valid_BL], 0),
        predicts=has_next_T.nonzero().squeeze(1),
        homes=homes,
        shape_BL=(valid_BL.shape[0], valid_BL.shape[1]),
        row_map=RowMap(lengths=tuple(n for n in valid_BL.sum(1).tolist() if n), positions_CT=None),
    )
