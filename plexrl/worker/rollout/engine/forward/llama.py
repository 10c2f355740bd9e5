"""A forward pass for Llama-like decoders, on the model's own parameter tensors.

It avoids the largest costs of small models: module calls, a new mask in every layer, keys repeated
for every query head, and linear layers over padding.

Shapes: T tokens of the pass, X hidden, H key-value heads, G query heads to each, J = H·G,
A = J + 2·H all heads, D head size; N, Q, L as in `step_batch`.
"""

from typing import Any

import torch
import torch.nn.functional as F

from plexrl.worker.rollout.engine.forward.experts import Experts
from plexrl.worker.rollout.engine.forward.joined_linear import JoinedLinear
from plexrl.worker.rollout.engine.kv_pool import KvPool
from plexrl.worker.rollout.engine.step_batch import Group, StepBatch
from plexrl.worker.rollout.engine.tensor_parallel import RankGroup


class LlamaForward:
    """Pre-norm blocks of rotary grouped-query attention and a gated MLP, or one with experts."""

    def __init__(self, model: Any, positions: int, ranks: RankGroup | None = None) -> None:
        decoder, config = model.get_decoder(), model.config
        self._ranks = ranks
        self._vocabulary = config.vocab_size
        self._embedding = _own_vocabulary(decoder.embed_tokens.weight, ranks, config)
        self._norm = (decoder.norm.weight, decoder.norm.variance_epsilon)
        self._head = _own_vocabulary(model.get_output_embeddings().weight, ranks, config)
        self._layers = [_LlamaLayer(layer, config, ranks) for layer in decoder.layers]
        place = torch.arange(positions, device=self._embedding.device)[None]
        cos, sin = decoder.rotary_emb(decoder.embed_tokens.weight[:1], place)
        half = sin.shape[-1] // 2
        # A rotation subtracts the first half; with the sign in the table that saves a product.
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        self._cos_P1D, self._sin_P1D = cos[0][:, None], sin[0][:, None]

    def __call__(self, batch: StepBatch, pool: KvPool) -> torch.Tensor:
        """As `Forward`."""
        if self._ranks is None:
            hidden_TX = self._embedding.index_select(0, batch.token_T)
        else:
            hidden_TX = self._ranks.embed(batch.token_T, self._embedding, self._vocabulary)
        cos_T1D = self._cos_P1D.index_select(0, batch.position_T)
        sin_T1D = self._sin_P1D.index_select(0, batch.position_T)
        for index, layer in enumerate(self._layers):
            layer.run(index, hidden_TX, cos_T1D, sin_T1D, batch, pool)
        if batch.wanted is not None:
            hidden_TX = hidden_TX.index_select(0, batch.wanted)
        weight, eps = self._norm
        logits = F.linear(torch.rms_norm(hidden_TX, weight.shape, weight, eps), self._head)
        if self._ranks is None:
            return logits
        return self._ranks.gather_logits(logits, self._vocabulary)


class _LlamaLayer:
    """One block's tensors: the model's own parameter objects, so that weight updates reach them."""

    def __init__(self, layer: Any, config: Any, ranks: RankGroup | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.ranks = ranks
        self.heads = config.num_key_value_heads // (1 if ranks is None else ranks.size)
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.size = attention.head_dim
        self.scale = attention.scaling
        self.norms = tuple(
            (norm.weight, norm.weight.shape, norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.head_norms = tuple(
            (norm.weight, norm.weight.shape, norm.variance_epsilon)
            for name in ("q_norm", "k_norm")
            if (norm := getattr(attention, name, None)) is not None
        )
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.inputs = JoinedLinear(projections, ranks)
        self.out = (_own_columns(attention.o_proj, ranks).t(), attention.o_proj.bias)
        self.experts = Experts(mlp, ranks) if hasattr(mlp, "experts") else None
        if self.experts is not None:
            return
        self.gate_and_up = JoinedLinear((mlp.gate_proj, mlp.up_proj), ranks)
        self.down = (_own_columns(mlp.down_proj, ranks).t(), mlp.down_proj.bias)
        self.activation = F.silu if config.hidden_act == "silu" else mlp.act_fn

    def run(
        self,
        index: int,
        hidden_TX: torch.Tensor,
        cos_T1D: torch.Tensor,
        sin_T1D: torch.Tensor,
        batch: StepBatch,
        pool: KvPool,
    ) -> None:
        """Add this block's outputs to `hidden_TX`, in place."""
        weight, shape, eps = self.norms[0]
        inputs_TX = torch.rms_norm(hidden_TX, shape, weight, eps)
        all_TAD = self.inputs(inputs_TX).view(hidden_TX.shape[0], -1, self.size)
        if self.head_norms:
            (q_weight, q_shape, q_eps), (k_weight, k_shape, k_eps) = self.head_norms
            query = all_TAD[:, : -2 * self.heads]
            query.copy_(torch.rms_norm(query, q_shape, q_weight, q_eps))
            key = all_TAD[:, -2 * self.heads : -self.heads]
            key.copy_(torch.rms_norm(key, k_shape, k_weight, k_eps))
        rotating = all_TAD[:, : -self.heads]
        half = self.size // 2
        swapped = torch.cat((rotating[..., half:], rotating[..., :half]), dim=-1)
        rotating.mul_(cos_T1D).addcmul_(swapped, sin_T1D)
        query_TJD = all_TAD[:, : -2 * self.heads]
        pool.write(index, batch.kv_index_T, all_TAD[:, -2 * self.heads :])
        attended = [self._attend(index, query_TJD, group, pool) for group in batch.groups]
        joined = attended[0] if len(attended) == 1 else torch.cat(attended)
        self._add(hidden_TX, joined, self.out)
        weight, shape, eps = self.norms[1]
        inputs_TX = torch.rms_norm(hidden_TX, shape, weight, eps)
        if self.experts is not None:
            found_TX = self.experts(inputs_TX)
            hidden_TX.add_(found_TX if self.ranks is None else self.ranks.all_reduce(found_TX))
            return
        gate, up = self.gate_and_up(inputs_TX).chunk(2, dim=-1)
        self._add(hidden_TX, self.activation(gate).mul_(up), self.down)

    def _add(
        self,
        sum_TX: torch.Tensor,
        inputs: torch.Tensor,
        linear: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        transposed, bias = linear
        if self.ranks is None:
            sum_TX.addmm_(inputs, transposed)
        else:
            sum_TX.add_(self.ranks.all_reduce(inputs @ transposed))
        if bias is not None:
            sum_TX.add_(bias)

    def _attend(
        self, index: int, query_TJD: torch.Tensor, group: Group, pool: KvPool
    ) -> torch.Tensor:
        """Attention output of the group's tokens, `[tokens, H·G·D]`."""
        keys_HNLD, values_HNLD = pool.gather(index, group.table_NW, group.rows)
        query = query_TJD[group.start : group.start + group.tokens]
        if group.width == 1:
            # The query heads of one key-value head take the query axis, so no key is repeated.
            query_HNGD = query.view(-1, self.heads, self.group, self.size).transpose(0, 1)
            out = F.scaled_dot_product_attention(
                query_HNGD,
                keys_HNLD,
                values_HNLD,
                attn_mask=group.mask_NQL[None],
                scale=self.scale,
            )
            return out.transpose(0, 1).reshape(group.tokens, -1)
        if group.spread_NQ is not None:
            query = query.index_select(0, group.spread_NQ)
        query_GHNQD = query.reshape(
            group.rows, group.width, self.heads, self.group, self.size
        ).permute(3, 2, 0, 1, 4)
        out_GHNQD = torch.stack(
            [
                F.scaled_dot_product_attention(
                    query_HNQD,
                    keys_HNLD,
                    values_HNLD,
                    attn_mask=group.mask_NQL[None],
                    scale=self.scale,
                )
                for query_HNQD in query_GHNQD
            ]
        )
        out = out_GHNQD.permute(2, 3, 1, 0, 4).reshape(group.rows * group.width, -1)
        return out if group.real is None else out.index_select(0, group.real)


def _own_columns(linear: Any, ranks: RankGroup | None) -> torch.Tensor:
    weight: torch.Tensor = linear.weight.data
    return weight if ranks is None else ranks.part_of(weight, axis=1)


def _own_vocabulary(weight: torch.Tensor, ranks: RankGroup | None, config: Any) -> torch.Tensor:
    return weight if ranks is None else ranks.vocabulary_part(weight.data, config.vocab_size)
