"""What one pass through the model computes: ragged new tokens of many rows, without padding.

All layers but attention see the tokens laid end to end. Attention needs a rectangle, so rows whose
new tokens and whose contexts are about equally many form a group with a rectangle of their own.

Shapes: T tokens of the pass, N rows of a group, Q new tokens of its longest row, W blocks of its
longest context, L = W·S positions.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from plexrl.worker.rollout.engine.blocks import SCRAP

Ints = npt.NDArray[np.int64]

FEW_TOKENS = 16
"""Rows with up to this many new tokens are grouped whatever the padding."""
SPLIT_POSITIONS = 1024
"""A group more is worth it where it saves this many positions of gathered context. Measured with 4
of 64 rows ten times as long as the rest: 1.7 times as quick as one group, with 512 as with 8192."""
_SEEN, _HIDDEN = np.float32(0.0), np.float32(-np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that attend together."""

    start: int
    """Its first token among the T."""
    tokens: int
    rows: int
    width: int
    """Q."""
    blocks: int
    """W."""
    table_NW: torch.Tensor
    """int64, flattened; `SCRAP` beyond a row's end."""
    mask_NQL: torch.Tensor
    """float, 0 where seen, -inf where not: SDPA is slower with a boolean one."""
    lengths: Ints
    """New tokens of each row."""
    spread_NQ: torch.Tensor | None
    """For every place of the rectangle the group's token there, padding repeating the row's first;
    absent where there is no padding."""
    real: torch.Tensor | None
    """Places of the rectangle that hold tokens, in order; absent where all do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The input of one pass."""

    token_T: torch.Tensor
    position_T: torch.Tensor
    place_T: torch.Tensor
    """Where each token's key and value go: block·S + offset."""
    groups: tuple[Group, ...]
    wanted: torch.Tensor | None
    """Tokens whose next token is to be predicted. None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be computed, one entry a row, in the order of the rows in the pass."""

    slots: Ints
    starts: Ints
    """Position of each row's first new token."""
    lengths: Ints
    """New tokens."""


def order_work(work: Work, block_tokens: int) -> tuple[Work, list[int]]:
    """Rows in an order in which neighbours are alike, and where each group begins."""
    blocks = -(-(work.starts + work.lengths) // block_tokens)
    single = int(work.lengths.max(initial=1)) == 1
    order = np.argsort(blocks, kind="stable") if single else np.lexsort((blocks, work.lengths))
    ordered = Work(slots=work.slots[order], starts=work.starts[order], lengths=work.lengths[order])
    return ordered, _cuts(ordered.lengths, blocks[order], block_tokens)


def _cuts(lengths: Ints, blocks: Ints, block_tokens: int) -> list[int]:
    """Where groups begin. Rows come by length, and those of one token by context."""
    cuts = [0]
    singles = int(np.searchsorted(lengths, 1, side="right"))
    # Blocks of single-token rows ascend: a cut at i saves those before it the difference.
    least = SPLIT_POSITIONS // block_tokens
    if singles > 1 and int(blocks[singles - 1]) * singles - int(blocks[:singles].sum()) >= least:
        for index in range(1, singles):
            saved = (int(blocks[singles - 1]) - int(blocks[index - 1])) * (index - cuts[-1])
            if saved >= least and blocks[index] >= 2 * blocks[index - 1]:
                cuts.append(index)
    if 0 < singles < len(lengths):
        cuts.append(singles)
    for index in range(singles + 1, len(lengths)):
        if lengths[index] > max(FEW_TOKENS, 2 * lengths[cuts[-1]]):
            cuts.append(index)
    return cuts


def build_batch(
    work: Work,
    cuts: Sequence[int],
    *,
    tokens: npt.NDArray[np.int32],
    tables: Ints,
    known: Ints,
    block_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> StepBatch:
    """The pass over `work`. `tokens` and `tables` have a row for each slot, `known` the number of
    tokens there; rows computed up to there have their next token predicted."""
    ends = np.cumsum(work.lengths)
    tokens_T = int(ends[-1])
    complete = work.starts + work.lengths == known[work.slots]
    wanted: torch.Tensor | None = None
    if tokens_T > len(ends) or not complete.all():
        wanted = torch.from_numpy(ends[complete] - 1).to(device)
    if tokens_T == len(ends):
        slot_T, position_T = work.slots, work.starts
    else:
        row_T = np.repeat(np.arange(len(ends)), work.lengths)
        slot_T = work.slots[row_T]
        position_T = np.arange(tokens_T) - (ends - work.lengths - work.starts)[row_T]
    packed = np.empty((3, tokens_T), dtype=np.int64)
    packed[0] = tokens[slot_T, position_T]
    packed[1] = position_T
    block_T, offset_T = np.divmod(position_T, block_tokens)
    packed[2] = tables[slot_T, block_T] * block_tokens + offset_T
    token_T, position, place_T = torch.from_numpy(packed).to(device).unbind()
    bounds = [*cuts, len(ends)]
    return StepBatch(
        token_T=token_T,
        position_T=position,
        place_T=place_T,
        groups=tuple(
            _group(work, first, last, ends, tables, block_tokens, device, dtype)
            for first, last in itertools.pairwise(bounds)
        ),
        wanted=wanted,
    )


def advance(batch: StepBatch, token_T: torch.Tensor) -> None:
    """Make `batch`, of rows of one token each, that of their next tokens, in the same blocks."""
    batch.token_T.copy_(token_T)
    batch.position_T.add_(1)
    batch.place_T.add_(1)
    for group in batch.groups:
        position_N = batch.position_T[group.start : group.start + group.rows]
        group.mask_NQL[:, 0].scatter_(1, position_N[:, None], 0.0)


def _group(
    work: Work,
    first: int,
    last: int,
    ends: Ints,
    tables: Ints,
    block_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Group:
    lengths = work.lengths[first:last]
    starts = work.starts[first:last]
    start = int(ends[first] - lengths[0])
    width = int(lengths.max())
    used = -(-(starts + lengths) // block_tokens)
    blocks = int(used.max())
    table = tables[work.slots[first:last], :blocks]
    if int(used.min()) < blocks:
        table[np.arange(blocks) >= used[:, None]] = SCRAP
    if int(lengths.min()) == width:
        position_NQ = starts[:, None] + np.arange(width)
        spread = places = None
    else:
        # A padding query stands on its row's first new position, so that it sees something.
        real = np.arange(width) < lengths[:, None]
        within = np.where(real, np.arange(width), 0)
        position_NQ = starts[:, None] + within
        offsets = (ends[first:last] - lengths - start)[:, None]
        spread = torch.from_numpy((offsets + within).reshape(-1)).to(device)
        places = torch.from_numpy(np.flatnonzero(real)).to(device)
    seen = np.arange(blocks * block_tokens) <= position_NQ[:, :, None]
    mask = torch.from_numpy(np.where(seen, _SEEN, _HIDDEN)).to(device, dtype)
    return Group(
        start=start,
        tokens=int(ends[last - 1]) - start,
        rows=last - first,
        width=width,
        blocks=blocks,
        table_NW=torch.from_numpy(table.reshape(-1)).to(device),
        mask_NQL=mask,
        lengths=lengths,
        spread_NQ=spread,
        real=places,
    )
