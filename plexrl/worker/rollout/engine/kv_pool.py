"""Memory of the KV cache's blocks: keys and values of every layer.

Shapes: H key-value heads, K = 2·H, keys first, B blocks of S tokens, D head size; T new tokens;
N rows of W blocks each, L = W·S positions.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Sizes of one rank's cache."""

    layers: int
    heads: int
    """Key-value heads."""
    head_size: int
    blocks: int
    """Blocks for tokens; one more is for padding."""
    block_tokens: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """One block of all layers."""
        values = 2 * self.layers * self.heads * self.head_size * self.block_tokens
        return values * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """All blocks, with the one for padding."""
        return (self.blocks + 1) * self.block_bytes


class KvPool:
    """The blocks, by number.

    The memory is lent, or else the pool's own: then it is allocated at first use, and its pages as
    they are written. Lent memory keeps its address, so that CUDA graphs may refer to it.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_size: int,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: torch.Tensor | None = None,
    ) -> None:
        """`memory`: lent memory of at least `nbytes`, as bytes. Absent: the pool has its own."""
        self._memory = memory
        self._heads = heads
        self._shape = (layers, 2 * heads, blocks, block_tokens, head_size)
        self._dtype = dtype
        self._device = device
        self._pool: torch.Tensor | None = None
        self._by_block: list[torch.Tensor] = []
        self._by_token: list[torch.Tensor] = []

    @property
    def heads(self) -> int:
        """Key-value heads."""
        return self._heads

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._shape[3]

    @property
    def position_bytes(self) -> int:
        """Key and value of one token in one layer."""
        return 2 * self._heads * self._shape[-1] * self._dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self._device

    @property
    def blocks(self) -> int:
        """Blocks, with the one for padding."""
        return self._shape[2]

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return math.prod(self._shape) * self._dtype.itemsize

    def take_memory(self, other: "KvPool") -> None:
        """Take the memory of `other`, which has as many values in fewer, or more, heads and blocks.
        Its content stays as it is; `other` has no memory afterwards. Both have been lent the same
        memory, or none."""
        memory = other._pool
        other.clear()
        self._use(None if memory is None else memory.view(self._shape))

    def layers(self) -> list[torch.Tensor]:
        """The memory of each layer, `[K, B, S, D]`."""
        self.prepare()
        assert self._pool is not None
        return list(self._pool)

    def prepare(self) -> None:
        """Get the memory after `clear`. It is zeroed: a masked position has weight 0, and 0·NaN
        would be NaN."""
        if self._pool is not None:
            return
        if self._memory is None:
            self._use(_zeros(self._shape, self._dtype, self._device))
            return
        # The last content may be that of weights that were not finite.
        pool = self._memory[: self.nbytes].view(self._dtype).view(self._shape)
        self._use(pool.zero_())

    def _use(self, pool: torch.Tensor | None) -> None:
        self._pool = pool
        if pool is None:
            return
        layers, heads, blocks, block_tokens, head_size = self._shape
        flat = pool.view(layers, heads, blocks * block_tokens, head_size)
        rows = pool.view(layers, heads, blocks, block_tokens * head_size)
        self._by_token, self._by_block = list(flat), list(rows)

    def clear(self) -> None:
        """Forget the content, and free the memory unless it is lent. Lent memory may be taken away
        until the next `prepare`."""
        self._pool = None
        self._by_block, self._by_token = [], []

    def write(self, layer: int, kv_index_T: torch.Tensor, new_TKD: torch.Tensor) -> None:
        """Store the keys and values of new tokens at positions block·S + offset."""
        self._by_token[layer].index_copy_(1, kv_index_T, new_TKD.transpose(0, 1))

    def gather(
        self, layer: int, table_NW: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[H, N, L, D]` of rows; `table_NW` lists their blocks, flattened."""
        found = self._by_block[layer].index_select(1, table_NW)
        found_KNLD = found.view(2 * self._heads, rows, -1, self._shape[-1])
        return found_KNLD[: self._heads], found_KNLD[self._heads :]

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks of all layers."""
        assert self._pool is not None
        taken = self._pool.index_select(2, torch.tensor(sources, device=self._device))
        self._pool.index_copy_(2, torch.tensor(targets, device=self._device), taken)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # `torch.zeros` writes every page; numpy gets zeroed pages from the kernel on first access.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
