"""Decode steps padded to few shapes, so that a captured CUDA graph serves many steps. Pure.

A CUDA graph has fixed shapes. A step of N rows that attend to W blocks is padded to the next shape
that has a graph: to a power of two of rows, because a decode step reads the weights once for any
number of rows; to a power of two or one and a half of blocks, because each block is read.

Padding rows compute token 0 at position 0 of the block for padding, and padding blocks are masked.

Shapes: as in `step_batch`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from plexrl.worker.rollout.engine.blocks import SCRAP
from plexrl.worker.rollout.engine.step_batch import StepBatch, StepGroup


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The padded size of one group of rows."""

    rows: int
    blocks: int


StepShape = tuple[GroupShape, ...]
"""By group."""


def shape_of(batch: StepBatch) -> StepShape | None:
    """The padded shape of a decode step; None: prompts are in it."""
    if batch.wanted is not None or any(group.width > 1 for group in batch.groups):
        return None
    return tuple(
        GroupShape(rows=padded_rows(group.rows), blocks=padded_blocks(group.blocks))
        for group in batch.groups
    )


def padded_rows(rows: int) -> int:
    """The least power of two that is at least `rows`."""
    return 1 << (rows - 1).bit_length()


def padded_blocks(blocks: int) -> int:
    """The least power of two, or one and a half, that is at least `blocks`."""
    whole = padded_rows(blocks)
    return whole * 3 // 4 if whole >= 4 and blocks <= whole * 3 // 4 else whole


def context_positions(shape: StepShape, block_tokens: int) -> int:
    """Positions of the KV cache that the largest group gathers at once in each layer."""
    return max(group.rows * group.blocks for group in shape) * block_tokens


class PaddedStep:
    """Inputs of a padded step, whose memory stays where it is."""

    def __init__(
        self,
        shape: StepShape,
        block_tokens: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`dtype` is that of the attention mask."""
        self._block_tokens = block_tokens
        self._filled: list[tuple[int, int]] = []
        """Rows and blocks of each group in the last `fill`."""
        rows = sum(group.rows for group in shape)
        inputs = torch.zeros((3, rows), dtype=torch.int64, device=device)
        inputs[2] = SCRAP * block_tokens
        groups, start = [], 0
        for each in shape:
            mask_shape = (each.rows, 1, each.blocks * block_tokens)
            mask_NQL = torch.full(mask_shape, -np.inf, dtype=dtype, device=device)
            # A row that sees nothing may be NaN, which would stay in the block for padding.
            mask_NQL[..., 0] = 0.0
            groups.append(
                StepGroup(
                    start=start,
                    tokens=each.rows,
                    rows=each.rows,
                    width=1,
                    blocks=each.blocks,
                    table_NW=torch.full((each.rows * each.blocks,), SCRAP, device=device),
                    mask_NQL=mask_NQL,
                    lengths=np.ones(each.rows, dtype=np.int64),
                    spread_NQ=None,
                    real=None,
                )
            )
            start += each.rows
        token_T, position_T, kv_index_T = inputs.unbind()
        self.batch = StepBatch(
            token_T=token_T,
            position_T=position_T,
            kv_index_T=kv_index_T,
            groups=tuple(groups),
            wanted=None,
        )
        """The padded step."""

    def fill(self, batch: StepBatch) -> None:
        """Copy a decode step of this shape to the inputs."""
        sizes = [(group.rows, group.blocks) for group in batch.groups]
        for padded, group in zip(self.batch.groups, batch.groups, strict=True):
            self._fill_tokens(padded, group, batch)
            table_NW = padded.table_NW.view(padded.rows, padded.blocks)
            mask_NL = padded.mask_NQL[:, 0]
            if sizes != self._filled:
                table_NW.fill_(SCRAP)
                mask_NL.fill_(-np.inf)
                mask_NL[group.rows :, 0] = 0.0
            width = group.blocks * self._block_tokens
            table_NW[: group.rows, : group.blocks] = group.table_NW.view(group.rows, -1)
            mask_NL[: group.rows, :width] = group.mask_NQL[:, 0]
        self._filled = sizes

    def _fill_tokens(self, padded: StepGroup, group: StepGroup, batch: StepBatch) -> None:
        """Copy tokens, positions and places in the cache."""
        ours, start = self.batch, padded.start
        end, padded_end = start + group.rows, start + padded.rows
        taken = slice(group.start, group.start + group.rows)
        for target, source, padding in (
            (ours.token_T, batch.token_T, 0),
            (ours.position_T, batch.position_T, 0),
            (ours.kv_index_T, batch.kv_index_T, SCRAP * self._block_tokens),
        ):
            target[start:end] = source[taken]
            target[end:padded_end] = padding

    def real(self, padded_RV: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """The rows of a result that belong to the rows of `batch`, in its order."""
        pieces = [
            padded_RV[padded.start : padded.start + group.rows]
            for padded, group in zip(self.batch.groups, batch.groups, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
