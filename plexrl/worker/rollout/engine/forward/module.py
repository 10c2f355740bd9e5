"""A forward pass by the model's own decoder, for architectures without a special pass.

Shapes: N, Q, L as in `step_batch`; H key-value heads, D head size.
"""

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from plexrl.worker.rollout.engine.kv_pool import KvPool
from plexrl.worker.rollout.engine.step_batch import StepBatch, StepGroup


class ModuleForward:
    """Runs the model's own decoder, group by group."""

    def __init__(self, model: Any) -> None:
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._cache = _GroupCache(model.config.num_hidden_layers)
        # transformers before 5.24 knows it by the second name.
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def __call__(self, batch: StepBatch, pool: KvPool) -> torch.Tensor:
        """As `Forward`."""
        hidden = [self._run(group, batch, pool) for group in batch.groups]
        hidden_TX = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        if batch.scored is not None:
            batch.scored.score(hidden_TX, self._head)
        if batch.wanted is not None:
            hidden_TX = hidden_TX.index_select(0, batch.wanted)
        logits: torch.Tensor = self._head(hidden_TX)
        return logits

    def _run(self, group: StepGroup, batch: StepBatch, pool: KvPool) -> torch.Tensor:
        span = slice(group.start, group.start + group.tokens)
        token, position = batch.token_T[span], batch.position_T[span]
        if group.spread_NQ is not None:
            token, position = token[group.spread_NQ], position[group.spread_NQ]
        self._cache.begin(pool, group, batch.kv_index_T[span])
        output = self._decoder(
            input_ids=token.view(group.rows, group.width),
            position_ids=position.view(group.rows, group.width),
            attention_mask=group.mask_NQL[:, None],
            use_cache=True,
            **{self._cache_name: self._cache},
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
        """Store the new tokens' keys and values `[N, H, Q, D]`; returns those of all positions
        `[N, H, L, D]`."""
        del args, kwargs
        pool, group = self._cache.pool, self._cache.group
        new = torch.cat((key_states, value_states), dim=1).transpose(1, 2).flatten(0, 1)
        if group.real is not None:
            new = new[group.real]
        pool.write(self._index, self._cache.kv_index, new)
        all_keys, all_values = pool.gather(self._index, group.table_NW, group.rows)
        return all_keys.transpose(0, 1), all_values.transpose(0, 1)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate nothing: the pool holds the memory."""
        del args, kwargs

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """(key length, offset); the caller passes the mask itself."""
        del args, kwargs
        return self._cache.group.mask_NQL.shape[-1], 0

    def get_seq_length(self) -> int:
        """Only used for positions, which the caller passes."""
        return 0

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    # transformers 5.10 knows it by this name.
    get_max_cache_shape = get_max_length


class _GroupCache(Cache):  # type: ignore[misc]  # transformers has no types
    """The cache that the decoder receives for one group."""

    pool: KvPool
    group: StepGroup
    kv_index: torch.Tensor

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_GroupLayer(self, index) for index in range(layers)])

    def begin(self, pool: KvPool, group: StepGroup, kv_index: torch.Tensor) -> None:
        """Set the next group."""
        self.pool, self.group, self.kv_index = pool, group, kv_index
