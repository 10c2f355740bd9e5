"""An index of queue heads by creation time that finds the first head that may fit.

No two jobs measure the same trace, so a backlog may have as many queues as deployments. The heads
are stored in sorted blocks with the smallest demand of each block, so a search skips blocks in
which nothing fits.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Final, NamedTuple

from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.waiting.bound import FitBound

BLOCK: Final = 128
"""A block with twice as many heads is split in two."""


class Head(NamedTuple):
    """The first unit of a queue, and what each unit of the queue needs."""

    created_at: float
    serial: int
    name: DeploymentId
    duty: float
    state_bytes: int


class _Block:
    """Neighbouring heads, ascending."""

    __slots__ = ("heads", "least_duty", "least_state_bytes")

    def __init__(self, heads: list[Head]) -> None:
        self.heads = heads
        self.least_duty = 0.0
        self.least_state_bytes = 0
        self.measure()

    def measure(self) -> None:
        """Compute the smallest duty and state of the block."""
        self.least_duty = min([head.duty for head in self.heads])
        self.least_state_bytes = min([head.state_bytes for head in self.heads])


class QueueHeadIndex:
    """Heads sorted by creation time, then by number."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        """Blocks of heads; none is empty."""
        self._lasts: list[Head] = []
        """The last head of each block."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __iter__(self) -> Iterator[Head]:
        for block in self._blocks:
            yield from block.heads

    @property
    def least(self) -> tuple[float, int]:
        """(creation time, number) of the first head."""
        head = self._blocks[0].heads[0]
        return head.created_at, head.serial

    def add(self, head: Head) -> None:
        """Insert a head. O(log n)."""
        blocks, lasts = self._blocks, self._lasts
        if not blocks:
            blocks.append(_Block([head]))
            lasts.append(head)
            return
        at = min(bisect_left(lasts, head), len(blocks) - 1)
        block = blocks[at]
        insort(block.heads, head)
        block.least_duty = min(block.least_duty, head.duty)
        block.least_state_bytes = min(block.least_state_bytes, head.state_bytes)
        if len(block.heads) > 2 * BLOCK:
            blocks.insert(at + 1, _Block(block.heads[BLOCK:]))
            del block.heads[BLOCK:]
            block.measure()
            lasts.insert(at, block.heads[-1])
            at += 1
        lasts[at] = blocks[at].heads[-1]

    def remove(self, head: Head) -> None:
        """Remove a head of the index."""
        at = bisect_left(self._lasts, head)
        block = self._blocks[at]
        index = bisect_left(block.heads, head)
        assert block.heads[index] == head, f"{head.name} is not in the index"
        del block.heads[index]
        if not block.heads:
            del self._blocks[at], self._lasts[at]
            return
        self._lasts[at] = block.heads[-1]
        if head.duty <= block.least_duty or head.state_bytes <= block.least_state_bytes:
            block.measure()

    def first(self, bound: FitBound, after: Head | None = None) -> Head | None:
        """The first head, or the first one behind `after`, that may fit; None if there is none."""
        begin = 0 if after is None else bisect_right(self._lasts, after)
        for at in range(begin, len(self._blocks)):
            block = self._blocks[at]
            if not bound.may_fit(block.least_duty, block.least_state_bytes):
                continue
            heads = block.heads
            inside = bisect_right(heads, after) if after is not None and at == begin else 0
            for index in range(inside, len(heads)):
                head = heads[index]
                if bound.may_fit(head.duty, head.state_bytes):
                    return head
        return None

    def check(self) -> None:
        """Assert that the blocks are sorted and their summaries correct."""
        assert self._lasts == [block.heads[-1] for block in self._blocks]
        heads = list(self)
        assert heads == sorted(heads), "heads are out of order"
        for block in self._blocks:
            summary = block.least_duty, block.least_state_bytes
            block.measure()
            assert summary == (block.least_duty, block.least_state_bytes)
