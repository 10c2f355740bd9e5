"""Causal attention within each of several packed rows, across context-parallel ranks.

Whole rows of similar length are padded and computed in one call, for which torch has fused kernels
on GPUs; their padding comes after every token of the row, so no token attends to it. This replaces
Megatron's `DotProductAttention`, which needs padded rows and refuses context parallelism. There
keys and values are all-gathered over the context ranks; the backward pass sums their gradients over
the ranks.

Shapes: T tokens of all rows on this rank, B rows of L tokens, H query heads, G key heads, D their
width, C context ranks.
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
        attend = self._whole_rows if attention_mask.positions_CT is None else self._shared_rows
        found_THD = attend(query_THD, key_TGD, value_TGD, attention_mask)
        return found_THD.flatten(1).unsqueeze(1)

    def _whole_rows(
        self, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, rows: RowMap
    ) -> torch.Tensor:
        counts = [len(group.places) for group in rows.groups]
        # One selection for all groups: the gradient of each would be as large as the micro-batch.
        split = (
            torch.split(each.index_select(0, rows.tokens), counts)
            for each in (query_THD, key_TGD, value_TGD)
        )
        parts = []
        for group, *own in zip(rows.groups, *split, strict=True):
            found = self._attend(*(group.padded(each) for each in own), mask=None)
            parts.append(group.values(found))
        return torch.cat(parts).index_select(0, rows.order)

    def _shared_rows(
        self, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, rows: RowMap
    ) -> torch.Tensor:
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
            row = (each[None] for each in (query_THD[start:end], keys, values))
            parts.append(self._attend(*row, mask=mask)[0])
            start = end
        return torch.cat(parts)

    def _attend(
        self,
        query_BLHD: torch.Tensor,
        key_BLGD: torch.Tensor,
        value_BLGD: torch.Tensor,
        *,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention output `[B, L, H, D]`; causal if there is no mask."""
        found_BHLD = scaled_dot_product_attention(
            query_BLHD.transpose(1, 2),
            key_BLGD.transpose(1, 2),
            value_BLGD.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._softmax_scale,
            enable_gqa=True,
        )
        return found_BHLD.transpose(1, 2)
