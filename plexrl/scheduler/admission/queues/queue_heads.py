"""Those who are first of their lines, in the order of their turns, found by what they need.

A backlog may have as many lines as deployments: no two jobs measure the same trace. So whoever
there may be room for is found without a look at the others: the heads lie in blocks, and of each
block the least that any of it needs is known.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Final, NamedTuple

from plexrl.ids import DeploymentId
from plexrl.scheduler.admission.fit.bound import FitBound

BLOCK: Final = 128
"""Heads of a block when it is cut in two."""


class Head(NamedTuple):
    """Who is first of a line, and what all of the line need."""

    created_at: float
    name: DeploymentId
    duty: float
    state_bytes: int


class _Block:
    """Neighbours, ascending."""

    __slots__ = ("heads", "least_duty", "least_state_bytes")

    def __init__(self, heads: list[Head]) -> None:
        self.heads = heads
        self.least_duty = 0.0
        self.least_state_bytes = 0
        self.measure()

    def measure(self) -> None:
        """What its heads need at least."""
        self.least_duty = min([head.duty for head in self.heads])
        self.least_state_bytes = min([head.state_bytes for head in self.heads])


class QueueHeadIndex:
    """Heads by the time of their creation, then by name."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        """None is empty."""
        self._lasts: list[Head] = []
        """Of each block."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __iter__(self) -> Iterator[Head]:
        for block in self._blocks:
            yield from block.heads

    @property
    def least(self) -> tuple[float, DeploymentId]:
        """(time of creation, name) of the first of all."""
        head = self._blocks[0].heads[0]
        return head.created_at, head.name

    def add(self, head: Head) -> None:
        """It is the first of its line from now on."""
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
        """It is first of a line no more."""
        at = bisect_left(self._lasts, head)
        block = self._blocks[at]
        index = bisect_left(block.heads, head)
        assert block.heads[index] == head, f"{head.name} is first of no line"
        del block.heads[index]
        if not block.heads:
            del self._blocks[at], self._lasts[at]
            return
        self._lasts[at] = block.heads[-1]
        if head.duty <= block.least_duty or head.state_bytes <= block.least_state_bytes:
            block.measure()

    def first(self, room: FitBound, after: Head | None = None) -> Head | None:
        """The first, or the first behind `after`, that there may be room for."""
        begin = 0 if after is None else bisect_right(self._lasts, after)
        for at in range(begin, len(self._blocks)):
            block = self._blocks[at]
            if not room.holds(block.least_duty, block.least_state_bytes):
                continue
            heads = block.heads
            inside = bisect_right(heads, after) if after is not None and at == begin else 0
            for index in range(inside, len(heads)):
                head = heads[index]
                if room.holds(head.duty, head.state_bytes):
                    return head
        return None

    def check(self) -> None:
        """Assert that what is known of the blocks is so."""
        assert self._lasts == [block.heads[-1] for block in self._blocks]
        every = list(self)
        assert every == sorted(every), "heads are out of order"
        for block in self._blocks:
            known = block.least_duty, block.least_state_bytes
            block.measure()
            assert known == (block.least_duty, block.least_state_bytes)
