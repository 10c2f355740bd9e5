"""Causal attention within each of several packed rows, across context-parallel ranks.

It replaces Megatron's `DotProductAttention`, which needs padded rows and refuses context
parallelism. Keys and values are all-gathered over the context ranks; the backward pass sums their
gradients over the ranks.

Shapes: T tokens of all rows on this rank, H query heads, G key heads, D their width, C context
ranks.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.nn.functional import scaled_dot_product_attention

from plexrl.worker.training.megatron.packed_rows import RowMap


class PackedAttention(torch.nn.Module):
    """A core attention for Megatron."""

    def __init__(self, config: Any, pg_collection: Any, **_: object) -> None:
        super().__init__()
        self._context = pg_collection.cp
        self._softmax_scale = config.softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: RowMap,
        **_: object,
    ) -> torch.Tensor:
        """Query `[T, 1, H, D]`, key and value `[T, 1, G, D]` to output `[T, 1, H·D]`."""
        query_THD, key_TGD, value_TGD = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if attention_mask.positions_CT is None:
            parts = self._whole_rows(query_THD, key_TGD, value_TGD, attention_mask)
        else:
            parts = self._shared_rows(query_THD, key_TGD, value_TGD, attention_mask)
        return torch.cat(parts).flatten(1).unsqueeze(1)

    def _whole_rows(
        self, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, rows: RowMap
    ) -> list[torch.Tensor]:
        lengths = list(rows.lengths)
        split = (torch.split(each, lengths) for each in (query_THD, key_TGD, value_TGD))
        return [self._attend(*row, mask=None) for row in zip(*split, strict=True)]

    def _shared_rows(
        self, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, rows: RowMap
    ) -> list[torch.Tensor]:
        positions_CT = rows.positions_CT
        assert positions_CT is not None, "the caller checks this"
        own = self._context.rank()
        both = torch.stack([key_TGD, value_TGD], dim=1)
        gathered = gather_from_sequence_parallel_region(both, group=self._context)
        both_CT2GD = gathered.unflatten(0, positions_CT.shape)
        parts = []
        start = 0
        for length in rows.lengths:
            end = start + length
            keys, values = both_CT2GD[:, start:end].flatten(0, 1).unbind(1)
            # Padding comes after every token of its row, so no token attends to it.
            at = positions_CT[:, start:end]
            mask = at[own][:, None] >= at.flatten()[None, :]
            parts.append(self._attend(query_THD[start:end], keys, values, mask=mask))
            start = end
        return parts

    def _attend(
        self,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        *,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention output of one row, `[T, H, D]`; causal if there is no mask."""
        found = scaled_dot_product_attention(
            query_THD.transpose(0, 1)[None],
            key_TGD.transpose(0, 1)[None],
            value_TGD.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._softmax_scale,
            enable_gqa=True,
        )
        return found[0].transpose(0, 1)
