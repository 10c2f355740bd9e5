"""The groups of ranks of an engine whose tensor-parallel size changes, and which heads ranks have.

The ranks of each group are consecutive, and the groups of a smaller size lie in those of a larger
one. Every rank keeps its share for the smallest groups. In larger groups it computes with a part of
what it had in smaller ones, so a switch moves no weights (PAT §4.3 gathers and slices them), and
part of the KV cache stays, too.

With 4 ranks and groups of 1, 2 or 4, the ranks keep the whole model, and compute with the halves
0 1 0 1, or with the quarters 0 2 1 3.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from plexrl.errors import InvalidRequestError
from plexrl.model.parallelism import Parallelism
from plexrl.worker.rollout.engine.tensor_parallel.ranks import CALLS_TIMEOUT, RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchGroups:
    """One rank's groups in an engine. All are made at the start, and used whenever their size is
    (PAT §4.3, reuse of communication groups)."""

    everyone: RankGroup
    """All ranks of the engine."""
    by_size: dict[int, RankGroup]
    """This rank's group of each size."""
    members: tuple[int, ...]
    """The engine's ranks, by their numbers among all processes."""
    control: Any = None
    """Process group of the engine's ranks for results and plans, in host memory. None: all
    processes."""
    made: int = 0
    """Communication groups that this process has made."""

    @property
    def rank(self) -> int:
        """This rank among the engine's."""
        return self.everyone.rank

    @property
    def world(self) -> int:
        """Ranks of the engine."""
        return self.everyone.size

    @property
    def smallest(self) -> int:
        """The smallest size."""
        return min(self.by_size)

    def count(self, size: int) -> int:
        """Number of groups of a size."""
        return self.world // size

    def index(self, size: int) -> int:
        """Index of this rank's group of a size."""
        return self.rank // size

    def of(self, size: int) -> RankGroup:
        """This rank's group of a size.

        Raises:
            InvalidRequestError: the engine has no groups of this size.
        """
        if size not in self.by_size:
            raise InvalidRequestError(
                f"tp is {size!r}; the engine's groups have {_either(self.by_size)} ranks: choose "
                "one of these, or create the deployment with other tp_sizes"
            )
        return self.by_size[size]

    def heads(self, rank: int, size: int, kv_heads: int) -> range:
        """The key-value heads, of `kv_heads`, whose cache rank `rank` has in groups of `size`."""
        own = kv_heads // size
        first = self.by_size[size].order[rank % size] * own
        return range(first, first + own)


def part_order(size: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """The part with which each rank of a group of `size` computes, one of `size`. It lies in the
    rank's parts for the smaller of `sizes`."""
    found = []
    for rank in range(size):
        index, smaller = 0, 1
        for larger in sorted(each for each in sizes if each <= size):
            count = larger // smaller
            index = index * count + rank // smaller % count
            smaller = larger
        found.append(index)
    return tuple(found)


def member(
    rank: int, size: int, sizes: Sequence[int], process_group: Any = None, **fields: Any
) -> RankGroup:
    """Rank `rank` of an engine as a member of its group of `size`, one of `sizes`."""
    return RankGroup(
        rank=rank % size,
        size=size,
        splits=size // min(sizes),
        order=part_order(size, sizes),
        process_group=process_group,
        **fields,
    )


def switch_groups(layout: Parallelism, sizes: Sequence[int], rank: int) -> SwitchGroups:
    """The groups of `rank` in the engine of its `layout.tp` ranks, of every size of `sizes`.

    Every process of the layout must call this, after the default process group exists.
    """
    made = 0
    found: SwitchGroups | None = None
    for members in layout.groups("tp"):
        world = len(members)
        # `new_group` is collective: every process takes part in making every group.
        whole = dist.new_group(list(members))
        control = dist.new_group(list(members), backend="gloo")
        calls = dist.new_group(list(members), timeout=CALLS_TIMEOUT, backend="gloo")
        made += 3
        groups: dict[tuple[int, int], Any] = {}
        for size in sizes:
            for first in range(0, world if 1 < size < world else 0, size):
                groups[size, first // size] = dist.new_group(list(members[first : first + size]))
                made += 1
        if rank not in members:
            continue
        own = members.index(rank)
        everyone = member(own, world, sizes, whole, calls_group=calls, leader=members[0])
        by_size = {
            size: everyone
            if size == world
            else member(own, size, sizes, groups.get((size, own // size)))
            for size in sizes
        }
        found = SwitchGroups(everyone=everyone, by_size=by_size, members=members, control=control)
    assert found is not None, "the layout has this rank"
    return replace(found, made=made)


def _either(sizes: dict[int, RankGroup]) -> str:
    *others, last = sorted(sizes)
    return f"{', '.join(str(size) for size in others)} or {last}"
