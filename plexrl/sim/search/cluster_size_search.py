"""Searches for the smallest cluster that meets its objectives.

Sizes double until one meets them; bisection then narrows the gap below, with several probes in
parallel if there are several cores. Neither step is exact, because waits are not monotone in the
number of nodes: placements differ, and a job may get a worse neighbour on a larger cluster. So the
sizes next below and next above the answer are run too, and the result states down to which size
all fail, and whether a larger size failed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError

NEIGHBOURS = 3
"""Number of sizes next below the answer that must fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """All probes and the answer."""

    nodes: int | None
    """The smallest size found that meets all objectives; None: no probed size does."""
    probes: Mapping[int, bool]
    """Whether each probed size met the objectives, ascending by size."""
    failing_from: int | None
    """All sizes from this one to `nodes` - 1 fail; None: `nodes` is the smallest possible."""

    @property
    def is_monotone(self) -> bool:
        """Whether no probed size fails above one that meets the objectives."""
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
    """Search sizes `lowest` to `highest`; `meets` runs several sizes in parallel, each once.

    Runs about log2(answer / lowest) sizes to bound the answer, as many again to find it if
    `at_once` is 1, `neighbours` sizes below it and one above.

    Raises:
        InvalidRequestError: the range of sizes is empty.
    """
    if not 1 <= lowest <= highest or at_once < 1:
        raise InvalidRequestError(
            f"cannot search clusters of {lowest} to {highest} nodes: the largest job needs "
            f"{lowest}, so raise --max-nodes to at least that"
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
    """The smallest size that meets the objectives if sizes below a failing one fail."""
    while True:
        low = max((size for size in probes if size < found and not probes[size]), default=lowest)
        gap = found - low
        if low == found or gap <= 1:
            return found
        probe([low + gap * part // (at_once + 1) for part in range(1, at_once + 1)])
        found = min((size for size in probes if low < size < found and probes[size]), default=found)
