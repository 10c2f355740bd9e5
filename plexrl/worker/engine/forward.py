"""One pass through a model over the block cache: our own for Llama-like decoders, or the model's.

Our own reads the model's parameter tensors and leaves out what costs most in small models: module
calls, masks made anew in every layer, keys repeated for every query head. `verify_forward` compares
either with the model's plain forward when the engine is made.

Shapes: T tokens of the pass, X hidden, H key-value heads, G query heads to each, A all
heads = H·G + 2·H, D head size; J = H·G; N, Q, L as in `step_batch`; R wanted tokens, V vocabulary.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from plexrl.errors import InvalidRequestError
from plexrl.worker.engine.kv_pool import KvPool
from plexrl.worker.engine.step_batch import Group, StepBatch, Work, build_batch

LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2", "qwen3"})
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on how long the input is."""
PROBE_TOKENS = 7


class Forward(Protocol):
    """Computes a pass."""

    def __call__(self, batch: StepBatch, pool: KvPool) -> torch.Tensor:
        """Logits `[R, V]` of the wanted tokens; keys and values of all tokens go to the pool."""
        ...


class Ranks(Protocol):
    """What a pass asks of the other tensor-parallel ranks."""

    @property
    def ranks(self) -> int:
        """How many there are."""
        ...

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        ...

    def embed(self, token_T: torch.Tensor, rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Embeddings from a vocabulary of which this rank holds `rows`."""
        ...

    def gather_logits(self, own_RV: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Logits of the whole vocabulary from every rank's."""
        ...


def make_forward(model: Any, positions: int, ranks: Ranks | None = None) -> "Forward":
    """The quickest pass that is right for this model, for positions below `positions`.

    With `ranks`, the model's parameters are this rank's boxes (`shards.box_of`).

    Raises:
        InvalidRequestError: some layer is no full attention over all positions, or the model's
            architecture cannot be split over ranks.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (not kinds and window is not None)
    if kinds - {"full_attention", "sliding_attention"} or (slides and (window or 0) < positions):
        raise InvalidRequestError(
            f"the torch engine keeps a cache of full attention only; model type "
            f"{config.model_type!r} has layers of kind {', '.join(sorted(kinds)) or 'sliding'}: "
            "use another rollout backend, or a max_sequence_tokens within the window"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type in LLAMA_LIKE and rope.get("rope_type", "default") in STATIC_ROPE:
        return LlamaForward(model, positions, ranks)
    if ranks is not None:
        raise InvalidRequestError(
            f"model type {config.model_type!r} cannot be split over workers; those that can are "
            f"{', '.join(sorted(LLAMA_LIKE))}: use 1 worker"
        )
    return ModuleForward(model)


class LlamaForward:
    """Pre-norm blocks of rotary grouped-query attention and a gated MLP."""

    def __init__(self, model: Any, positions: int, ranks: Ranks | None = None) -> None:
        decoder, config = model.get_decoder(), model.config
        self._ranks = ranks
        self._vocabulary = config.vocab_size
        self._embedding = decoder.embed_tokens.weight
        self._norm = (decoder.norm.weight, decoder.norm.variance_epsilon)
        self._head = model.get_output_embeddings().weight
        self._layers = [_LlamaLayer(layer, config, ranks) for layer in decoder.layers]
        place = torch.arange(positions, device=self._embedding.device)[None]
        cos, sin = decoder.rotary_emb(self._embedding[:1], place)
        half = sin.shape[-1] // 2
        # The first half is subtracted in a rotation; with the sign here one product less is left.
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
    """One block's tensors: the model's own parameter objects, so they follow a weight update."""

    def __init__(self, layer: Any, config: Any, ranks: Ranks | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.ranks = ranks
        self.heads = config.num_key_value_heads // (1 if ranks is None else ranks.ranks)
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
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = (
            (linear.weight, linear.bias)
            for linear in (
                *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
                *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
            )
        )
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
        tokens = hidden_TX.shape[0]
        query = F.linear(inputs_TX, *self.query).view(tokens, -1, self.size)
        key = F.linear(inputs_TX, *self.key).view(tokens, -1, self.size)
        value = F.linear(inputs_TX, *self.value).view(tokens, -1, self.size)
        if self.head_norms:
            (q_weight, q_shape, q_eps), (k_weight, k_shape, k_eps) = self.head_norms
            query = torch.rms_norm(query, q_shape, q_weight, q_eps)
            key = torch.rms_norm(key, k_shape, k_weight, k_eps)
        all_TAD = torch.cat((query, key, value), dim=1)
        turning = all_TAD[:, : -self.heads]
        half = self.size // 2
        turned = torch.cat((turning[..., half:], turning[..., :half]), dim=-1)
        turning.mul_(cos_T1D).addcmul_(turned, sin_T1D)
        query_TJD = all_TAD[:, : -2 * self.heads]
        pool.write(index, batch.place_T, all_TAD[:, -2 * self.heads :])
        seen = [self._attend(index, query_TJD, group, pool) for group in batch.groups]
        joined = seen[0] if len(seen) == 1 else torch.cat(seen)
        self._add(hidden_TX, joined, self.out)
        weight, shape, eps = self.norms[1]
        inputs_TX = torch.rms_norm(hidden_TX, shape, weight, eps)
        gate = self.activation(F.linear(inputs_TX, *self.gate))
        self._add(hidden_TX, gate.mul_(F.linear(inputs_TX, *self.up)), self.down)

    def _add(
        self,
        sum_TX: torch.Tensor,
        inputs: torch.Tensor,
        linear: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        weight, bias = linear
        if self.ranks is None:
            sum_TX.addmm_(inputs, weight.t())
        else:
            sum_TX.add_(self.ranks.add_up(inputs @ weight.t()))
        if bias is not None:
            sum_TX.add_(bias)

    def _attend(
        self, index: int, query_TJD: torch.Tensor, group: Group, pool: KvPool
    ) -> torch.Tensor:
        """What the group's tokens attend to, `[tokens, H·G·D]`."""
        keys_HNLD, values_HNLD = pool.gather(index, group.table_NW, group.rows)
        query = query_TJD[group.start : group.start + group.tokens]
        if group.width == 1:
            # The query heads of one key-value head stand where other queries would: no repeats.
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


class ModuleForward:
    """The model's own decoder, group by group; for architectures we have no pass of our own for."""

    def __init__(self, model: Any) -> None:
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._cache = _GroupCache(model.config.num_hidden_layers)

    def __call__(self, batch: StepBatch, pool: KvPool) -> torch.Tensor:
        """As `Forward`."""
        hidden = [self._run(group, batch, pool) for group in batch.groups]
        hidden_TX = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        if batch.wanted is not None:
            hidden_TX = hidden_TX.index_select(0, batch.wanted)
        logits: torch.Tensor = self._head(hidden_TX)
        return logits

    def _run(self, group: Group, batch: StepBatch, pool: KvPool) -> torch.Tensor:
        span = slice(group.start, group.start + group.tokens)
        token, position = batch.token_T[span], batch.position_T[span]
        if group.spread_NQ is not None:
            token, position = token[group.spread_NQ], position[group.spread_NQ]
        self._cache.begin(pool, group, batch.place_T[span])
        output = self._decoder(
            input_ids=token.view(group.rows, group.width),
            position_ids=position.view(group.rows, group.width),
            attention_mask=group.mask_NQL[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: torch.Tensor = output.last_hidden_state.reshape(group.rows * group.width, -1)
        return hidden if group.real is None else hidden.index_select(0, group.real)


class _GroupLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """One layer's view of a group's blocks."""

    is_sliding = False

    def __init__(self, cache: "_GroupCache", index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' `[N, H, Q, D]`; returns those of all positions `[N, H, L, D]`."""
        del args, kwargs
        pool, group = self._cache.pool, self._cache.group
        new = torch.cat((key_states, value_states), dim=1).transpose(1, 2).flatten(0, 1)
        if group.real is not None:
            new = new[group.real]
        pool.write(self._index, self._cache.place, new)
        all_keys, all_values = pool.gather(self._index, group.table_NW, group.rows)
        return all_keys.transpose(0, 1), all_values.transpose(0, 1)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """The pool has the memory."""
        del args, kwargs

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """(key length, offset); the mask is passed ready-made."""
        del args, kwargs
        return self._cache.group.mask_NQL.shape[-1], 0

    def get_seq_length(self) -> int:
        """Asked for positions only, and those are passed."""
        return 0

    def get_max_length(self) -> int:
        """No bound of its own."""
        return -1


class _GroupCache(Cache):  # type: ignore[misc]  # transformers has no types
    """What the decoder is given for one group."""

    pool: KvPool
    group: Group
    place: torch.Tensor

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_GroupLayer(self, index) for index in range(layers)])

    def begin(self, pool: KvPool, group: Group, place: torch.Tensor) -> None:
        """The group that comes next."""
        self.pool, self.group, self.place = pool, group, place


def weight_device(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where the parameters lie and of what kind they are."""
    first = next(model.parameters())
    return first.device, first.dtype


def cache_shape(model: nn.Module, ranks: int = 1) -> tuple[int, int, int]:
    """(layers, key-value heads of one of `ranks`, head size).

    Raises:
        InvalidRequestError: the heads cannot be shared equally.
    """
    config: Any = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if kv_heads % ranks:
        raise InvalidRequestError(
            f"{kv_heads} key-value heads cannot be shared by {ranks} workers: choose a divisor"
        )
    return config.num_hidden_layers, kv_heads // ranks, head_size


@torch.inference_mode()
def probe(model: Any) -> torch.Tensor:
    """The model's own logprobs `[V]` after a few tokens, for `verify_forward`."""
    tokens = torch.from_numpy(_probe_tokens(model)).long().to(weight_device(model)[0])
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[0, -1].float().log_softmax(-1)


@torch.inference_mode()
def verify_forward(forward: Forward, model: Any, wanted: torch.Tensor, ranks: int = 1) -> None:
    """Compare a pass with what `probe` found.

    Raises:
        InvalidRequestError: they differ. Some architectures scale or cap their logits outside the
            decoder, or need inputs that an engine does not give; wrong tokens would be the result.
    """
    device, dtype = weight_device(model)
    layers, heads, head_size = cache_shape(model, ranks)
    pool = KvPool(
        layers=layers,
        heads=heads,
        head_size=head_size,
        blocks=3,
        block_tokens=4,
        dtype=dtype,
        device=device,
    )
    pool.prepare()
    batch = build_batch(
        Work(slots=np.array([0]), starts=np.array([0]), lengths=np.array([PROBE_TOKENS])),
        [0],
        tokens=_probe_tokens(model),
        tables=np.array([[1, 2]]),
        known=np.array([PROBE_TOKENS]),
        block_tokens=4,
        device=device,
        dtype=dtype,
    )
    found = forward(batch, pool)[-1].float().log_softmax(-1)
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    if not torch.allclose(found, wanted, atol=tolerance, rtol=tolerance):
        raise InvalidRequestError(
            f"the torch engine computes model type {model.config.model_type!r} otherwise than "
            f"transformers (logprobs differ by {float((found - wanted).abs().max()):.2g}): use "
            "another rollout backend for it"
        )


def _probe_tokens(model: Any) -> npt.NDArray[np.int32]:
    return np.arange(PROBE_TOKENS, dtype=np.int32)[None] % np.int32(model.config.vocab_size)
