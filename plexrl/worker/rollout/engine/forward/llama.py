"""A forward pass for Llama-like decoders, on the model's own parameter tensors.

It avoids the largest costs of small models: module calls, a new mask in every layer, keys repeated
for every query head, and linear layers over padding.

Shapes: T tokens of the pass, X hidden, H key-value heads, G query heads to each, J = H·G,
A = J + 2·H all heads, D head size; N, Q, L as in `step_batch`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from plexrl.model.architecture.families import FAMILIES, Family
from plexrl.worker.rollout.engine.forward.experts import Experts
from plexrl.worker.rollout.engine.forward.joined_linear import JoinedLinear
from plexrl.worker.rollout.engine.kv_pool import KvPool
from plexrl.worker.rollout.engine.step_batch import StepBatch, StepGroup
from plexrl.worker.rollout.engine.tensor_parallel import RankGroup


class LlamaForward:
    """Pre-norm blocks of rotary grouped-query attention and a gated MLP, or one with experts.

    Layers of one kind (`layer_types` of the configuration) share a rotation and an attention mask.
    A layer with a sliding window gathers the whole context, and masks what lies before its window.
    """

    def __init__(self, model: Any, positions: int, ranks: RankGroup | None = None) -> None:
        decoder, config = model.get_decoder(), model.config
        family = FAMILIES[config.model_type]
        self._ranks = ranks
        self._vocabulary = config.vocab_size
        self._embedding = _own_vocabulary(decoder.embed_tokens.weight, ranks, config)
        self._embedding_scale = getattr(decoder.embed_tokens, "embed_scale", None)
        self._norm = _Norm(decoder.norm, family)
        self._head = _own_vocabulary(model.get_output_embeddings().weight, ranks, config)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._layers = [_LlamaLayer(layer, config, family, ranks) for layer in decoder.layers]
        self._kinds = layer_kinds(config)
        self._positions = {
            kind: _Positions(decoder, kind, window_of(config, kind), positions, family)
            for kind in dict.fromkeys(self._kinds)
        }

    def __call__(self, batch: StepBatch, pool: KvPool) -> torch.Tensor:
        """As `Forward`."""
        if self._ranks is None:
            hidden_TX = self._embedding.index_select(0, batch.token_T)
        else:
            hidden_TX = self._ranks.embed(batch.token_T, self._embedding, self._vocabulary)
        if self._embedding_scale is not None:
            hidden_TX.mul_(self._embedding_scale.to(hidden_TX.dtype))
        shared = {kind: each.of(batch) for kind, each in self._positions.items()}
        for index, layer in enumerate(self._layers):
            layer.run(index, hidden_TX, shared[self._kinds[index]], batch, pool)
        if batch.scored is not None:
            batch.scored.score(hidden_TX, self._logits)
        if batch.wanted is not None:
            hidden_TX = hidden_TX.index_select(0, batch.wanted)
        return self._logits(hidden_TX)

    def _logits(self, hidden_TX: torch.Tensor) -> torch.Tensor:
        logits = F.linear(self._norm(hidden_TX), self._head)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        if self._ranks is None:
            return logits
        return self._ranks.gather_logits(logits, self._vocabulary)


def layer_kinds(config: Any) -> tuple[str, ...]:
    """`full_attention` or `sliding_attention` (or a kind that has no pass here) of each layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(kinds)
    slides = getattr(config, "sliding_window", None) is not None
    kind = "sliding_attention" if slides else "full_attention"
    return (kind,) * int(config.num_hidden_layers)


def window_of(config: Any, kind: str) -> int | None:
    """Positions that a token of such a layer sees, itself included; None: all before it."""
    return config.sliding_window if kind == "sliding_attention" else None


@dataclass(frozen=True, slots=True)
class _Shared:
    """The values that the layers of one kind share in one pass."""

    cos_T1D: torch.Tensor
    sin_T1D: torch.Tensor
    masks: list[torch.Tensor]
    """By group, `[N, Q, L]`."""


class _Positions:
    """Rotation and mask of the layers of one kind."""

    def __init__(
        self, decoder: Any, kind: str, window: int | None, positions: int, family: Family
    ) -> None:
        self._window = None if window is None or window >= positions else window
        weight = decoder.embed_tokens.weight
        place = torch.arange(positions, device=weight.device)[None]
        # A family may have another base of rotation for each kind.
        kinds = (kind,) if kind in (decoder.config.rope_parameters or {}) else ()
        cos, sin = decoder.rotary_emb(weight[:1], place, *kinds)
        if family.has_half_rotation:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        half = sin.shape[-1] // 2
        # A rotation subtracts the first of two; with the sign in the table that saves a product.
        if family.interleaves_rotation:
            cos = cos[..., :half].repeat_interleave(2, dim=-1)
            sin = torch.stack((-sin[..., :half], sin[..., :half]), dim=-1).flatten(-2)
        else:
            sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        self._cos_P1D, self._sin_P1D = cos[0][:, None], sin[0][:, None]

    def of(self, batch: StepBatch) -> _Shared:
        """The rotary factors and masks for the tokens of one pass."""
        return _Shared(
            self._cos_P1D.index_select(0, batch.position_T),
            self._sin_P1D.index_select(0, batch.position_T),
            [self._mask(group, batch) for group in batch.groups],
        )

    def _mask(self, group: StepGroup, batch: StepBatch) -> torch.Tensor:
        if self._window is None:
            return group.mask_NQL
        position = batch.position_T[group.start : group.start + group.tokens]
        if group.spread_NQ is not None:
            position = position.index_select(0, group.spread_NQ)
        first_NQ1 = position.view(group.rows, group.width, 1) - (self._window - 1)
        length = group.mask_NQL.shape[-1]
        place_L = torch.arange(length, device=position.device)
        return group.mask_NQL.masked_fill(place_L < first_NQ1, -torch.inf)


class _Norm:
    """A norm of the model's own weight."""

    def __init__(self, norm: Any, family: Family) -> None:
        self._weight, self._shape = norm.weight, norm.weight.shape
        self._adds_one = family.norm_adds_one
        self._eps: float = norm.eps if self._adds_one else norm.variance_epsilon

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self._adds_one:
            return torch.rms_norm(inputs, self._shape, self._weight, self._eps)
        # The product is rounded once, after it, so not to the dtype of the inputs before it.
        normed = torch.rms_norm(inputs.float(), self._shape, None, self._eps)
        return normed.mul_(1.0 + self._weight.float()).to(inputs.dtype)


class _LlamaLayer:
    """One block's tensors: the model's own parameter objects, so that weight updates reach them."""

    def __init__(self, layer: Any, config: Any, family: Family, ranks: RankGroup | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.ranks = ranks
        self.heads = config.num_key_value_heads // (1 if ranks is None else ranks.size)
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.size = attention.head_dim
        self.scale = attention.scaling
        self.input_norm = _Norm(layer.input_layernorm, family)
        self.output_norms: tuple[_Norm | None, _Norm | None] = (None, None)
        if family.sandwich_norms is None:
            self.mlp_norm = _Norm(layer.post_attention_layernorm, family)
        else:
            norms = [_Norm(getattr(layer, name), family) for name in family.sandwich_norms]
            self.mlp_norm = norms[1]
            self.output_norms = (norms[0], norms[2])
        self.head_norms: tuple[_Norm, ...] = ()
        if family.has_qk_norm:
            self.head_norms = (_Norm(attention.q_norm, family), _Norm(attention.k_norm, family))
        self.sinks_HG: torch.Tensor | None = None
        if family.has_sinks:
            sinks_J = attention.sinks.data if ranks is None else ranks.part_of(attention.sinks.data)
            self.sinks_HG = sinks_J.view(self.heads, self.group)
        self.interleaves = family.interleaves_rotation
        if family.fuses_qkv:
            self.inputs = JoinedLinear((attention.qkv_proj,), ranks)
        else:
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            self.inputs = JoinedLinear(projections, ranks)
        self.out = (_own_columns(attention.o_proj, ranks).t(), attention.o_proj.bias)
        self.experts = Experts(mlp, ranks) if family.has_experts else None
        if self.experts is not None:
            return
        joint = (mlp.gate_up_proj,) if family.fuses_gate_and_up else (mlp.gate_proj, mlp.up_proj)
        self.gate_and_up = JoinedLinear(joint, ranks)
        self.down = (_own_columns(mlp.down_proj, ranks).t(), mlp.down_proj.bias)
        activation = mlp.activation_fn if family.fuses_gate_and_up else mlp.act_fn
        self.activation = F.silu if getattr(config, "hidden_act", None) == "silu" else activation

    def run(
        self,
        index: int,
        hidden_TX: torch.Tensor,
        shared: _Shared,
        batch: StepBatch,
        pool: KvPool,
    ) -> None:
        """Add this block's outputs to `hidden_TX`, in place."""
        all_TAD = self.inputs(self.input_norm(hidden_TX)).view(hidden_TX.shape[0], -1, self.size)
        if self.head_norms:
            norm_query, norm_key = self.head_norms
            query = all_TAD[:, : -2 * self.heads]
            query.copy_(norm_query(query))
            key = all_TAD[:, -2 * self.heads : -self.heads]
            key.copy_(norm_key(key))
        # A model may rotate only the first elements of a head.
        width = shared.cos_T1D.shape[-1]
        rotating = all_TAD[:, : -self.heads, :width]
        if self.interleaves:
            pairs = rotating.reshape(*rotating.shape[:-1], width // 2, 2)
            swapped = pairs.flip(-1).flatten(-2)
        else:
            halves = (rotating[..., width // 2 :], rotating[..., : width // 2])
            swapped = torch.cat(halves, dim=-1)
        rotating.mul_(shared.cos_T1D).addcmul_(swapped, shared.sin_T1D)
        query_TJD = all_TAD[:, : -2 * self.heads]
        pool.write(index, batch.kv_index_T, all_TAD[:, -2 * self.heads :])
        attended = [
            self._attend(index, query_TJD, group, mask_NQL, pool)
            for group, mask_NQL in zip(batch.groups, shared.masks, strict=True)
        ]
        joined = attended[0] if len(attended) == 1 else torch.cat(attended)
        self._add(hidden_TX, joined, self.out, self.output_norms[0])
        inputs_TX = self.mlp_norm(hidden_TX)
        if self.experts is not None:
            found_TX = self.experts(inputs_TX)
            hidden_TX.add_(found_TX if self.ranks is None else self.ranks.all_reduce(found_TX))
            return
        gate, up = self.gate_and_up(inputs_TX).chunk(2, dim=-1)
        self._add(hidden_TX, self.activation(gate).mul_(up), self.down, self.output_norms[1])

    def _add(
        self,
        sum_TX: torch.Tensor,
        inputs: torch.Tensor,
        linear: tuple[torch.Tensor, torch.Tensor | None],
        norm: _Norm | None,
    ) -> None:
        transposed, bias = linear
        if norm is not None:
            out_TX = inputs @ transposed
            if self.ranks is not None:
                out_TX = self.ranks.all_reduce(out_TX)
            sum_TX.add_(norm(out_TX if bias is None else out_TX.add_(bias)))
            return
        if self.ranks is None:
            sum_TX.addmm_(inputs, transposed)
        else:
            sum_TX.add_(self.ranks.all_reduce(inputs @ transposed))
        if bias is not None:
            sum_TX.add_(bias)

    def _sinks_by_group(self) -> list[torch.Tensor | None]:
        """Sinks `[H, 1, 1, 1]` of one query head of each key-value head, G times."""
        if self.sinks_HG is None:
            return [None] * self.group
        return list(self.sinks_HG.t()[..., None, None, None])

    def _attend(
        self,
        index: int,
        query_TJD: torch.Tensor,
        group: StepGroup,
        mask_NQL: torch.Tensor,
        pool: KvPool,
    ) -> torch.Tensor:
        """Attention output of the group's tokens, `[tokens, H·G·D]`."""
        keys_HNLD, values_HNLD = pool.gather(index, group.table_NW, group.rows)
        query = query_TJD[group.start : group.start + group.tokens]
        if group.width == 1:
            # The query heads of one key-value head take the query axis, so no key is repeated.
            query_HNGD = query.view(-1, self.heads, self.group, self.size).transpose(0, 1)
            sinks = None if self.sinks_HG is None else self.sinks_HG[:, None, :, None]
            out = attend(query_HNGD, keys_HNLD, values_HNLD, mask_NQL[None], self.scale, sinks)
            return out.transpose(0, 1).reshape(group.tokens, -1)
        if group.spread_NQ is not None:
            query = query.index_select(0, group.spread_NQ)
        query_GHNQD = query.reshape(
            group.rows, group.width, self.heads, self.group, self.size
        ).permute(3, 2, 0, 1, 4)
        out_GHNQD = torch.stack(
            [
                attend(query_HNQD, keys_HNLD, values_HNLD, mask_NQL[None], self.scale, sinks)
                for query_HNQD, sinks in zip(query_GHNQD, self._sinks_by_group(), strict=True)
            ]
        )
        out = out_GHNQD.permute(2, 3, 1, 0, 4).reshape(group.rows * group.width, -1)
        return out if group.real is None else out.index_select(0, group.real)


def attend(
    query_HNQD: torch.Tensor,
    keys_HNLD: torch.Tensor,
    values_HNLD: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output `[H, N, Q, D]`. `mask`, and `sinks` with one column, extend to
    `[H, N, Q, L]`."""
    if sinks is not None:
        # A key of zeros, whose logit is the sink: its value of zeros adds nothing to the output.
        shape = query_HNQD.shape[:-1]
        mask = torch.cat((mask.expand(*shape, -1), sinks.expand(*shape, 1)), dim=-1)
        keys_HNLD, values_HNLD = F.pad(keys_HNLD, (0, 0, 0, 1)), F.pad(values_HNLD, (0, 0, 0, 1))
    return F.scaled_dot_product_attention(
        query_HNQD, keys_HNLD, values_HNLD, attn_mask=mask, scale=scale
    )


def _own_columns(linear: Any, ranks: RankGroup | None) -> torch.Tensor:
    weight: torch.Tensor = linear.weight.data
    return weight if ranks is None else ranks.part_of(weight, axis=1)


def _own_vocabulary(weight: torch.Tensor, ranks: RankGroup | None, config: Any) -> torch.Tensor:
    return weight if ranks is None else ranks.vocabulary_part(weight.data, config.vocab_size)
