"""Ownership of the KV cache's blocks, with prefix caching.

Invariants, checked by `check_invariants`:
- A block is free, held or kept. A held block has as many holders as its count says. A kept block
  has no holder but still has a name: a later request may reuse it. Kept blocks are evicted, oldest
  first, when no block is free.
- No name stands for two blocks, and no block has two names.
- Block 0 has no holder: padding writes there.

A block's name is a hash of all tokens up to the block's end. So equal names mean equal keys and
values, as long as the weights do not change.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

SCRAP = 0
"""The block that padding writes to."""


class BlockPool:
    """Bookkeeping of `blocks` blocks of `block_tokens` tokens, one of them `SCRAP`."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.capacity = blocks - 1
        self.counts = np.zeros(blocks, dtype=np.int32)
        """Number of holders of each block."""
        self._free = list(range(blocks - 1, SCRAP, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can allocate."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        """Blocks that some sample holds."""
        return self.capacity - self.available

    @property
    def kept(self) -> int:
        """Blocks without a holder that a request may still reuse."""
        return len(self._kept)

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks to one holder: free blocks first, then the oldest kept ones.

        `count` must not exceed `available`.
        """
        assert count <= self.available, "the caller checks `available` first"
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                del self._by_name[self._names.pop(block)]
            self.counts[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that are held or kept."""
        for block in blocks:
            self._kept.pop(block, None)
            self.counts[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a holder from each block. A named block without holders is kept.

        The last of `blocks` is evicted before the first: a prefix is useful without the rest.
        """
        for block in reversed(blocks):
            self.counts[block] -= 1
            assert self.counts[block] >= 0, f"block {block} was given back too often"
            if self.counts[block] == 0:
                if block in self._names:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def name(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Name blocks, so that `find` finds them. A block that has a name keeps it, and a name that
        another block has is skipped."""
        for block, name in zip(blocks, names, strict=False):
            if block not in self._names and name not in self._by_name:
                self._names[block] = name
                self._by_name[name] = block

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix of `names` that is cached. Call `share` to hold them."""
        found = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def kept_among(self, blocks: Iterable[int]) -> int:
        """Number of `blocks` that are available now and would not be after `share`."""
        return sum(block in self._kept for block in blocks)

    def forget(self) -> None:
        """Drop all names after a weight update. Held blocks stay held."""
        self._free.extend(reversed(self._kept))
        self._kept.clear()
        self._names.clear()
        self._by_name.clear()

    def clear(self) -> None:
        """Drop all names; no block is held. The next blocks that are allocated are consecutive."""
        assert not self.counts.any(), "a block is held"
        self.forget()
        self._free.sort(reverse=True)

    def check_invariants(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert the invariants above, given the blocks of each holder."""
        held = Counter(block for blocks in holders for block in blocks)
        free, kept = set(self._free), set(self._kept)
        assert SCRAP not in free | kept | set(held)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & kept
        assert not (free | kept) & set(held), "a held block could be allocated"
        assert free | kept | set(held) == set(range(1, self.capacity + 1)), "a block is lost"
        for block in range(self.capacity + 1):
            assert self.counts[block] == held[block], f"block {block} is miscounted"
        assert {block: name for name, block in self._by_name.items()} == self._names
        assert kept <= set(self._names)
        assert not free & set(self._names)


def block_names(
    tokens: npt.NDArray[np.int32], block_tokens: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Names of the full blocks of `tokens`, given those of the first ones."""
    names = list(known)
    for start in range(len(names) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        before = names[-1] if names else b""
        block = np.ascontiguousarray(tokens[start : start + block_tokens], dtype=np.int32)
        names.append(hashlib.blake2b(before + block.tobytes(), digest_size=16).digest())
    return names
