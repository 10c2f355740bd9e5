"""The smallest cluster that keeps to its objectives.

Sizes grow by doubling until one will do; the gap below it is then halved, with several probes at a
time where there are several cores. Neither rests on proof: waiting need not fall with every node
(placements differ, and a larger cluster may put a job where it meets a worse neighbour). So the
sizes next below the one found and the one next above it are run as well, and the answer says down
to which size all fail, and whether a larger size was seen to fail.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError

NEIGHBOURS = 3
"""Sizes next below the answer that are known to fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was tried, and what came of it."""

    nodes: int | None
    """The smallest size found that meets all; None: none up to the highest does."""
    probes: Mapping[int, bool]
    """Every size that was run, ascending, and whether it met the objectives."""
    failing_from: int | None
    """All sizes from this to just below `nodes` fail; None: `nodes` is the least there is."""

    @property
    def is_monotone(self) -> bool:
        """No size that was run fails above one that does not."""
        met = [size for size, met in self.probes.items() if met]
        return all(self.probes[size] for size in self.probes if met and size > met[0])


def smallest(
    meets: Callable[[Sequence[int]], Sequence[bool]],
    *,
    lowest: int,
    highest: int,
    at_once: int = 1,
    neighbours: int = NEIGHBOURS,
) -> Search:
    """Search sizes `lowest` to `highest`; `meets` runs several of them side by side, each once.

    Runs about log2(answer / lowest) sizes to bound the answer, as many again to find it where
    `at_once` is 1, `neighbours` below it and one above.

    Raises:
        InvalidRequestError: there is no size to search.
    """
    if not 1 <= lowest <= highest or at_once < 1:
        raise InvalidRequestError(
            f"cannot search clusters of {lowest} to {highest} nodes: the largest job needs "
            f"{lowest}, so let --max-nodes be at least that"
        )
    probes: dict[int, bool] = {}

    def probe(sizes: Sequence[int]) -> None:
        new = sorted({size for size in sizes if size not in probes})
        probes.update(zip(new, meets(new), strict=True) if new else ())

    found = _first_by_doubling(probe, probes, lowest, highest, at_once)
    if found is None:
        return Search(nodes=None, probes=dict(sorted(probes.items())), failing_from=lowest)
    while True:
        found = _narrowed(probe, probes, lowest, found, at_once)
        below = range(max(lowest, found - neighbours), found)
        probe([*below, min(highest, found + 1)])
        lower = [size for size in below if probes[size]]
        if not lower:
            break
        found = lower[0]
    failing_from = found
    while probes.get(failing_from - 1) is False:
        failing_from -= 1
    return Search(
        nodes=found,
        probes=dict(sorted(probes.items())),
        failing_from=failing_from if failing_from < found else None,
    )


def _first_by_doubling(
    probe: Callable[[Sequence[int]], None],
    probes: Mapping[int, bool],
    lowest: int,
    highest: int,
    at_once: int,
) -> int | None:
    sizes = [lowest]
    while sizes[-1] < highest:
        sizes.append(min(highest, 2 * sizes[-1]))
    for first in range(0, len(sizes), at_once):
        batch = sizes[first : first + at_once]
        probe(batch)
        for size in batch:
            if probes[size]:
                return size
    return None


def _narrowed(
    probe: Callable[[Sequence[int]], None],
    probes: Mapping[int, bool],
    lowest: int,
    found: int,
    at_once: int,
) -> int:
    """The least size that meets, taking it that sizes below a failing one fail."""
    while True:
        low = max((size for size in probes if size < found and not probes[size]), default=lowest)
        gap = found - low
        if low == found or gap <= 1:
            return found
        probe([low + gap * part // (at_once + 1) for part in range(1, at_once + 1)])
        found = min((size for size in probes if low < size < found and probes[size]), default=found)
