"""The best arrangement of entries in staleness buffers, by trying all of them.

It shares no code with `plexrl.rollout.staleness`: an entry is (version, is complete), and an
arrangement gives each entry a buffer. Arrangements with equal numbers in each buffer count once.
"""

from collections.abc import Sequence
from functools import lru_cache

Entry = tuple[int, bool]
Numbers = tuple[tuple[int, int], ...]
"""Of each buffer from the first one on: its complete and its running entries."""


def arrangements(
    entries: Sequence[Entry], *, first: int, staleness: int, size: int, extra: int
) -> set[Numbers]:
    """Every legal arrangement: no entry is too stale for its buffer, and no buffer too full."""
    found: set[Numbers] = {((0, 0),) * (staleness + 1)}
    for version, is_complete in entries:
        grown = set()
        for numbers in found:
            for place in range(version + staleness - first + 1):
                complete, running = numbers[place]
                added = (complete + is_complete, running + (not is_complete))
                if added[0] <= size and sum(added) <= size + extra:
                    grown.add((*numbers[:place], added, *numbers[place + 1 :]))
        found = grown
    # A full batch is trained: nothing that is running belongs to it.
    return {each for each in found if not any(c == size and r for c, r in each)}


def earliest(
    entries: Sequence[Entry], *, first: int, staleness: int, size: int, extra: int
) -> tuple[int, ...] | None:
    """The largest numbers of complete entries, first buffer first; None: no arrangement."""
    relative = tuple(sorted((version - first, is_complete) for version, is_complete in entries))
    return _earliest(relative, staleness, size, extra)


@lru_cache(maxsize=1 << 17)
def _earliest(
    entries: tuple[Entry, ...], staleness: int, size: int, extra: int
) -> tuple[int, ...] | None:
    found = arrangements(entries, first=0, staleness=staleness, size=size, extra=extra)
    return max((tuple(c for c, _ in numbers) for numbers in found), default=None)
