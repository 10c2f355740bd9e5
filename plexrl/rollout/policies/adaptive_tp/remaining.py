"""The work that is left to decode under each size of the tensor-parallel groups (PAT Alg. 1,
est_rem_time).

All rows of a group decode in step. A row ends when it has drawn the tokens that it lacks; the rest
of its group goes on, with fewer rows and longer contexts. The time of a stretch is that of the
group that takes longest.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor


class UnfinishedRow(NamedTuple):
    """A row that decodes."""

    tokens: int
    """Prompt and drawn tokens."""
    left: int
    """Tokens that it still draws: at most, or as expected."""


Groups = Sequence[Sequence[UnfinishedRow]]
"""The rows of each group."""


def deal(rows: Sequence[UnfinishedRow], groups: int) -> list[list[UnfinishedRow]]:
    """The rows in as many groups, in equal numbers at each time: those that end last first."""
    ordered = sorted(rows, key=lambda row: (-row.left, -row.tokens))
    return [ordered[index::groups] for index in range(groups)]


class GroupLoad:
    """Groups of one size with their rows."""

    __slots__ = ("_ends", "_squares", "_tokens", "groups", "tp")

    def __init__(self, tp: int, groups: Groups) -> None:
        self.tp = tp
        self.groups = [sorted(group, key=lambda row: -row.left) for group in groups if group]
        self._ends = [[-row.left for row in group] for group in self.groups]
        # Sums of the longest-lasting n rows, by n.
        self._tokens = [[0, *accumulate(row.tokens for row in group)] for group in self.groups]
        self._squares = [[0, *accumulate(row.tokens**2 for row in group)] for group in self.groups]

    def at(self, steps: int) -> Iterator[tuple[int, int, float]]:
        """For each group after so many steps: the rows that are left, their tokens, and the root
        mean square of these."""
        for ends, tokens, squares in zip(self._ends, self._tokens, self._squares, strict=True):
            rows = bisect_right(ends, -steps - 1)
            if rows:
                total = tokens[rows] + rows * steps
                square = squares[rows] + 2 * steps * tokens[rows] + rows * steps * steps
                yield rows, total, math.sqrt(square / rows)

    def stretches_s(self, predictor: LatencyPredictor, cuts: Sequence[int]) -> list[float]:
        """Seconds of the steps from each of `cuts`, which ascend from 0, to the next one."""
        found = [0.0] * (len(cuts) - 1)
        for index in range(len(self.groups)):
            for stretch, seconds in enumerate(self._group_s(index, predictor, cuts)):
                found[stretch] = max(found[stretch], seconds)
        return found

    def _group_s(
        self, index: int, predictor: LatencyPredictor, cuts: Sequence[int]
    ) -> Iterator[float]:
        sums, begin = self._tokens[index], 0
        ends = sorted({row.left for row in self.groups[index]})
        for cut in cuts[1:]:
            seconds = 0.0
            while begin < cut:
                rows = bisect_right(self._ends[index], -begin - 1)
                if not rows:
                    break
                end = min(cut, ends[bisect_right(ends, begin)])
                tokens = sums[rows] + rows * begin
                seconds += predictor.steps_s(self.tp, rows, tokens, end - begin)
                begin = end
            begin = cut
            yield seconds


def remaining_s(predictor: LatencyPredictor, tp: int, groups: Groups) -> float:
    """Seconds until the last row has ended, in groups of `tp` ranks (PAT Alg. 1, est_rem_time)."""
    last = max((row.left for group in groups for row in group), default=0)
    return GroupLoad(tp, groups).stretches_s(predictor, [0, last])[0]
