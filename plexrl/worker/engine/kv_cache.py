"""Keys and values of the running samples, one slot each, the running ones always in front.

Shapes: S slots, N running, H key-value heads, L positions, D head size.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 64
"""Positions are added in steps of this many."""


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """One decoder layer's cache; grows to the longest sample seen."""

    is_sliding = False

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache
        self.keys_SHLD: torch.Tensor | None = None
        self.values_SHLD: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each row's new key and value at its position; returns all rows' up to the longest.

        `key_states` and `value_states` are `[N, H, 1, D]`.
        """
        del args, kwargs
        rows = self._cache.running
        self._reserve(key_states, self._cache.length)
        assert self.keys_SHLD is not None
        assert self.values_SHLD is not None
        index = self._cache.rows_N
        self.keys_SHLD[index, :, self._cache.position_N] = key_states[:, :, 0]
        self.values_SHLD[index, :, self._cache.position_N] = value_states[:, :, 0]
        length = self._cache.length
        return self.keys_SHLD[:rows, :, :length], self.values_SHLD[:rows, :, :length]

    def place(
        self, slots: torch.Tensor, keys_PHLD: torch.Tensor, values_PHLD: torch.Tensor
    ) -> None:
        """Put prefilled prompts into `slots`."""
        length = keys_PHLD.shape[2]
        self._reserve(keys_PHLD, length)
        assert self.keys_SHLD is not None
        assert self.values_SHLD is not None
        self.keys_SHLD[slots, :, :length] = keys_PHLD
        self.values_SHLD[slots, :, :length] = values_PHLD

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots `source` over slots `target`."""
        for tensor in (self.keys_SHLD, self.values_SHLD):
            if tensor is not None:
                tensor[target] = tensor[source]

    def clear(self) -> None:
        """Give the memory back."""
        self.keys_SHLD = self.values_SHLD = None

    def _reserve(self, like: torch.Tensor, length: int) -> None:
        have = 0 if self.keys_SHLD is None else self.keys_SHLD.shape[2]
        if have >= length:
            return
        grown = -(-length // GROWTH) * GROWTH
        shape = (self._cache.slots, like.shape[1], grown, like.shape[3])
        for name in ("keys_SHLD", "values_SHLD"):
            old = getattr(self, name)
            new = torch.zeros(shape, dtype=like.dtype)
            if old is not None:
                new[:, :, :have] = old
            setattr(self, name, new)

    # What `transformers` asks of a layer beside `update`.

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Memory is taken by `update` and `place`."""
        del args, kwargs

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """(key length, offset); the engine passes its own mask."""
        del args, kwargs
        return self._cache.length, 0

    def get_seq_length(self) -> int:
        """Positions in use before this step."""
        return max(0, self._cache.length - 1)

    def get_max_length(self) -> int:
        """No bound of its own."""
        return -1


class SlotCache(Cache):  # type: ignore[misc]  # transformers has no types
    """The cache that the model is given in decode steps."""

    def __init__(self, slots: int, layers: int) -> None:
        self.slots = slots
        self.running = 0
        self.length = 0
        self.position_N = torch.empty(0, dtype=torch.int64)
        self.rows_N = torch.empty(0, dtype=torch.int64)
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def begin_step(self, position_N: torch.Tensor) -> None:
        """The running rows' next positions, for the step to come."""
        self.running = len(position_N)
        self.position_N = position_N
        self.rows_N = torch.arange(self.running)
        self.length = int(position_N.max()) + 1

    def slot_layers(self) -> list[SlotLayer]:
        """The layers by their own type."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def clear(self) -> None:
        """Give all memory back."""
        for layer in self.slot_layers():
            layer.clear()
