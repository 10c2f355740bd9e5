"""The input of one forward pass: the new tokens of many rows, packed without padding.

All layers except attention process the packed tokens. Attention needs a rectangle, so rows with
similar numbers of new tokens and similar context lengths form a group with its own rectangle.

Shapes: T tokens of the pass, N rows of a group, Q new tokens of its longest row, W blocks of its
longest context, L = W·S positions.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from plexrl.worker.rollout.engine.blocks import SCRAP

Ints = npt.NDArray[np.int64]

FEW_TOKENS = 16
"""Rows with up to this many new tokens share a group, however much padding that needs."""
SPLIT_POSITIONS = 1024
"""A group is split if that saves this many positions of gathered context. Measured with 4 of 64
rows ten times as long as the rest: 1.7 times faster than one group, both with 512 and with 8192."""
_SEEN, _HIDDEN = np.float32(0.0), np.float32(-np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroup:
    """Rows that attend together."""

    start: int
    """Index of the group's first token among the T."""
    tokens: int
    rows: int
    width: int
    """Q."""
    blocks: int
    """W."""
    table_NW: torch.Tensor
    """Block table, int64, flattened; `SCRAP` beyond a row's end."""
    mask_NQL: torch.Tensor
    """Attention mask, float: 0 for visible positions, -inf for others. SDPA is slower with a
    boolean mask."""
    lengths: Ints
    """New tokens of each row."""
    spread_NQ: torch.Tensor | None
    """Index of the group's token for every cell of the rectangle; padding repeats the row's first
    token. Absent: there is no padding."""
    real: torch.Tensor | None
    """Cells of the rectangle that hold tokens, in order. Absent: all do."""


SCORED_TOKENS = 256
"""Tokens of prompts whose logits exist at a time: 150 MB with the largest vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Tokens of prompts whose next tokens' logprobs are wanted."""

    index: torch.Tensor
    """int64: their indices among the T."""
    keep: Callable[[int, torch.Tensor], None]
    """Takes the place in `index` from which on these logits `[S, V]` are, and the logits."""

    def score(self, hidden_TX: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compute the logits from the last layer's output, some tokens at a time."""
        for first in range(0, len(self.index), SCORED_TOKENS):
            part = self.index[first : first + SCORED_TOKENS]
            self.keep(first, head(hidden_TX.index_select(0, part)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The input of one pass."""

    token_T: torch.Tensor
    position_T: torch.Tensor
    kv_index_T: torch.Tensor
    """Cache position of each token's key and value: block·S + offset."""
    groups: tuple[StepGroup, ...]
    wanted: torch.Tensor | None
    """Tokens whose next token is predicted. None: all."""
    scored: Scored | None = None
    """Absent: no prompt of the pass is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The tokens to compute, one entry per row, in the order of the rows in the pass."""

    slots: Ints
    starts: Ints
    """Position of each row's first new token."""
    lengths: Ints
    """New tokens of each row."""


def order_work(work: Work, block_tokens: int) -> tuple[Work, list[int]]:
    """Sort rows so that similar ones are neighbours; also returns where each group begins."""
    blocks = -(-(work.starts + work.lengths) // block_tokens)
    single = int(work.lengths.max(initial=1)) == 1
    order = np.argsort(blocks, kind="stable") if single else np.lexsort((blocks, work.lengths))
    ordered = Work(slots=work.slots[order], starts=work.starts[order], lengths=work.lengths[order])
    return ordered, _cuts(ordered.lengths, blocks[order], block_tokens)


def _cuts(lengths: Ints, blocks: Ints, block_tokens: int) -> list[int]:
    """Indexes at which groups begin. Rows are sorted by length, those of one token by context."""
    cuts = [0]
    singles = int(np.searchsorted(lengths, 1, side="right"))
    # Block counts of single-token rows ascend. A cut at i spares earlier rows the longer padding.
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
    """The batch for `work`. `tokens` and `tables` have one row per slot, and `known` the number of
    tokens in it. The next token is predicted for rows whose known tokens are then all computed."""
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
    token_T, position, kv_index_T = torch.from_numpy(packed).to(device).unbind()
    bounds = [*cuts, len(ends)]
    return StepBatch(
        token_T=token_T,
        position_T=position,
        kv_index_T=kv_index_T,
        groups=tuple(
            _group(work, first, last, ends, tables, block_tokens, device, dtype)
            for first, last in itertools.pairwise(bounds)
        ),
        wanted=wanted,
    )


def advance(batch: StepBatch, token_T: torch.Tensor) -> None:
    """Advance a batch of one-token rows, in place, to their next tokens in the same blocks."""
    batch.token_T.copy_(token_T)
    batch.position_T.add_(1)
    batch.kv_index_T.add_(1)
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
) -> StepGroup:
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
        # A padding query uses its row's first new position, so that some position is visible.
        real = np.arange(width) < lengths[:, None]
        within = np.where(real, np.arange(width), 0)
        position_NQ = starts[:, None] + within
        offsets = (ends[first:last] - lengths - start)[:, None]
        spread = torch.from_numpy((offsets + within).reshape(-1)).to(device)
        places = torch.from_numpy(np.flatnonzero(real)).to(device)
    seen = np.arange(blocks * block_tokens) <= position_NQ[:, :, None]
    mask = torch.from_numpy(np.where(seen, _SEEN, _HIDDEN)).to(device, dtype)
    return StepGroup(
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
