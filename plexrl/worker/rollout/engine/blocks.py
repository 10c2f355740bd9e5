"""Who owns which block of the KV cache.

Laws, checked by `check_invariants`:
- A block is free, held, or kept: held by as many samples as its count says, or by none but still
  known by its content (kept for a later request, given up when blocks run short, oldest first).
- No name stands for two blocks, and no block has two names.
- Block 0 belongs to nobody: padding writes there.

A name is a hash of all tokens up to the block's end, so equal names mean equal keys and values,
under one version of the weights.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

SCRAP = 0
"""The block that takes padding."""


class BlockPool:
    """Counts of `blocks` blocks of `block_tokens` tokens, one of them scrap."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.capacity = blocks - 1
        self.counts = np.zeros(blocks, dtype=np.int32)
        """Holders of each block."""
        self._free = list(range(blocks - 1, SCRAP, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        """Blocks that some sample holds."""
        return self.capacity - self.available

    @property
    def kept(self) -> int:
        """Blocks that nobody holds and a request may still find."""
        return len(self._kept)

    def take(self, count: int) -> list[int]:
        """`count` blocks for one holder; ask `available` first. Kept ones go last."""
        assert count <= self.available, "ask `available` first"
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
        """One holder more for blocks that are held or kept."""
        for block in blocks:
            self._kept.pop(block, None)
            self.counts[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder less. A named block that nobody holds is kept.

        The last of `blocks` is given up before the first: a prefix is of use without what follows.
        """
        for block in reversed(blocks):
            self.counts[block] -= 1
            assert self.counts[block] >= 0, f"block {block} was given back once too often"
            if self.counts[block] == 0:
                if block in self._names:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def name(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Make blocks findable. What has a name, or whose name is taken, stays as it is."""
        for block, name in zip(blocks, names, strict=False):
            if block not in self._names and name not in self._by_name:
                self._names[block] = name
                self._by_name[name] = block

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of known names from the first on; not yet shared."""
        found = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def kept_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` count as available now, and would not once shared."""
        return sum(block in self._kept for block in blocks)

    def forget(self) -> None:
        """Forget all names: the weights changed. Held blocks stay held."""
        self._free.extend(reversed(self._kept))
        self._kept.clear()
        self._names.clear()
        self._by_name.clear()

    def check_invariants(self, holders: Iterable[Iterable[int]]) -> None:
        """The laws above, given the blocks of each holder."""
        held = Counter(block for blocks in holders for block in blocks)
        free, kept = set(self._free), set(self._kept)
        assert SCRAP not in free | kept | set(held)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & kept
        assert not (free | kept) & set(held), "a held block could be handed out"
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
