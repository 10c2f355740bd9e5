"""Packs a micro-batch's rows end to end for Megatron, and maps the results back.

Shapes: B rows, L tokens of the longest row; T tokens of all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn.functional import pad

from plexrl.worker.batches.packing import MicroBatch

LONG_ROW_TOKENS = 64
"""From this length on the time of a row's attention is that of its tokens, not of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of similar length, whose attention is one call of a kernel."""

    shape: tuple[int, int]
    """Rows, and tokens of the longest one."""
    places: torch.Tensor
    """int64: the place of each of their tokens in `shape`, flattened, row after row. Rows begin at
    column 0."""

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the tokens as `[*shape, ...]`, 0 where no token is."""
        rest = values.shape[1:]
        places = self.shape[0] * self.shape[1]
        if len(values) < places:
            values = values.new_zeros(places, *rest).index_copy(0, self.places, values)
        return values.view(*self.shape, *rest)

    def values(self, padded: torch.Tensor) -> torch.Tensor:
        """Values of the tokens out of `[*shape, ...]`."""
        flat = padded.flatten(0, 1)
        return flat if len(self.places) == len(flat) else flat.index_select(0, self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """Row boundaries in a packed micro-batch. Passed in Megatron's `attention_mask`."""

    lengths: tuple[int, ...]
    """Tokens of each row on one context rank; the same on all of them. None is 0."""
    positions_CT: torch.Tensor | None
    """int64: each token's position in its row, for each of C context ranks; None: whole rows."""
    groups: tuple[RowGroup, ...]
    """All rows, if they are whole."""
    tokens: torch.Tensor
    """int64: the indices of the groups' tokens, end to end."""
    order: torch.Tensor
    """int64: the inverse, for each token its place among those of the groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """A packed micro-batch; tensors are int64."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    targets_T: torch.Tensor
    """The token that each position predicts; 0 if it predicts none."""
    predicts: torch.Tensor
    """Indices of the packed tokens that predict a token, in order."""
    result_index: torch.Tensor
    """Index in `[B, L]`, flattened, of the result of each of `predicts`."""
    shape_BL: tuple[int, int]
    row_map: RowMap

    def placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> "PackedRows":
        """The same rows with all tensors where `place` puts them."""
        row_map = self.row_map
        positions_CT = row_map.positions_CT
        groups = (replace(group, places=place(group.places)) for group in row_map.groups)
        return replace(
            self,
            tokens_T=place(self.tokens_T),
            positions_T=place(self.positions_T),
            targets_T=place(self.targets_T),
            predicts=place(self.predicts),
            result_index=place(self.result_index),
            row_map=replace(
                row_map,
                positions_CT=None if positions_CT is None else place(positions_CT),
                groups=tuple(groups),
                tokens=place(row_map.tokens),
                order=place(row_map.order),
            ),
        )

    def unpacked(self, values_T: torch.Tensor) -> torch.Tensor:
        """Results `[T, …]` as `[B, L, …]`, 0 where there is none; with a graph."""
        rest = values_T.shape[1:]
        flat = values_T.new_zeros(self.shape_BL[0] * self.shape_BL[1], *rest)
        found = flat.index_copy(0, self.result_index, values_T[self.predicts])
        return found.view(*self.shape_BL, *rest)

    def of_last_tokens(self, values_T: torch.Tensor) -> torch.Tensor:
        """The value of each row's last token, `[B]`; rows must be whole."""
        # A row of padding comes last.
        lengths = self.row_map.lengths[: self.shape_BL[0]]
        return values_T[[end - 1 for end in accumulate(lengths)]]


def pack_rows(
    batch: MicroBatch, context_rank: int = 0, context_ranks: int = 1, *, token_multiple: int = 1
) -> PackedRows:
    """Pack the rows of a micro-batch; an empty one gets one token of padding. A last row of padding
    makes the number of tokens a multiple of `token_multiple`."""
    valid_BL = batch.valid_BL
    if not valid_BL.any():
        # Every rank takes part in the collectives of every micro-batch, which cannot be empty.
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
        # `plexrl.router.dispatch.context_split` cuts each row into 2·ranks chunks; rank c has the
        # chunks c and 2·ranks-1-c.
        chunk_T = (lengths_B // 2)[rows_T]
        rank_C1 = torch.arange(context_ranks)[:, None]
        late_C1 = 2 * context_ranks - 2 - rank_C1
        positions_CT = columns_T + chunk_T * torch.where(columns_T < chunk_T, rank_C1, late_C1)
    lengths = tuple(length for length in lengths_B.tolist() if length)
    tokens_T, targets_T = batch.tokens_BL[valid_BL], targets_BL[valid_BL].clamp(min=0)
    if missing := -len(tokens_T) % token_multiple:
        lengths = (*lengths, missing)
        tokens_T, targets_T = (pad(tensor, (0, missing)) for tensor in (tokens_T, targets_T))
        padding_CP = torch.arange(missing).expand(len(positions_CT), -1)
        positions_CT = torch.cat([positions_CT, padding_CP], dim=1)
    groups, tokens = _grouped(lengths if context_ranks == 1 else ())
    return PackedRows(
        tokens_T=tokens_T,
        positions_T=positions_CT[context_rank],
        targets_T=targets_T,
        predicts=has_target_BL[valid_BL].nonzero().squeeze(1),
        # The result of a position is in the next column.
        result_index=has_target_BL.flatten().nonzero().squeeze(1) + 1,
        shape_BL=(valid_BL.shape[0], valid_BL.shape[1]),
        row_map=RowMap(
            lengths=lengths,
            positions_CT=None if context_ranks == 1 else positions_CT,
            groups=groups,
            tokens=tokens,
            order=tokens.argsort(),
        ),
    )


def _grouped(lengths: Sequence[int]) -> tuple[tuple[RowGroup, ...], torch.Tensor]:
    """All rows, in as few groups as waste little time on padding, and the groups' tokens."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows: dict[tuple[int, int], list[int]] = {}
    for row, length in enumerate(lengths):
        rows.setdefault(_length_class(length), []).append(row)
    groups = []
    for members in rows.values():
        own = [lengths[row] for row in members]
        firsts = [index * max(own) for index in range(len(own))]
        groups.append(RowGroup(shape=(len(own), max(own)), places=_ranges(firsts, own)))
    order = [row for members in rows.values() for row in members]
    return tuple(groups), _ranges([starts[row] for row in order], [lengths[row] for row in order])


def _length_class(length: int) -> tuple[int, int]:
    """Equal for lengths whose rows are one group. Its longest row is less than twice as long as its
    shortest, or less than 9/8 times if they are long: work grows with the square of the length."""
    bits = length.bit_length()
    return bits, length >> (bits - 4) if length >= LONG_ROW_TOKENS else 0


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Consecutive numbers from each start on, end to end."""
    pairs = zip(starts, lengths, strict=True)
    ranges = [torch.arange(start, start + length) for start, length in pairs]
    return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])
