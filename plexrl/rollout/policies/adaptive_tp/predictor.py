"""Predicts decode steps, prefill and switches of tensor-parallel groups from a profile (PAT §4.2).

For each profiled number of rows there is a piecewise-linear curve over the context tokens `T` of a
group. Between two numbers of rows it is interpolated linearly: l(B, T; TP). Beyond the profile, a
curve goes on with its last slope, but does not fall; each further row takes what one takes between
the two largest numbers of rows, in a decode step with an empty context and in a prefill with the
length of the rows; and nothing is faster than the smallest point of its curve.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plexrl.client.data.decode_profile import DecodeProfile, ProfilePoint
from plexrl.errors import InvalidRequestError

KvHandling = Literal["migrate", "recompute"]
"""Treatment of the KV cache of unfinished rows in a switch."""


class Curve:
    """A piecewise-linear function through points of different x."""

    __slots__ = ("_slopes", "_xs", "_ys")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """Points with the same x are replaced by their mean. There must be at least one point."""
        by_x: dict[float, list[float]] = {}
        for x, y in points:
            by_x.setdefault(x, []).append(y)
        self._xs = sorted(by_x)
        self._ys = [math.fsum(by_x[x]) / len(by_x[x]) for x in self._xs]
        xs, ys = self._xs, self._ys
        rises = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]
        # Flat before the first point; after the last one as before it, if that does not fall.
        self._slopes = [0.0, *rises, max(0.0, rises[-1]) if rises else 0.0]

    def at(self, x: float) -> float:
        """The value at `x`."""
        index = bisect_right(self._xs, x)
        at = max(0, index - 1)
        return self._ys[at] + self._slopes[index] * (x - self._xs[at])

    def total(self, first: float, step: int, count: int) -> float:
        """The sum of the values at `first`, `first + step`, …, `count` of them; `step` > 0. Its
        cost grows with the number of points, not with `count`."""
        found, done = 0.0, 0
        while done < count:
            x = first + step * done
            index = bisect_right(self._xs, x)
            left = count - done
            if index < len(self._xs):
                left = min(left, max(1, math.ceil((self._xs[index] - x) / step)))
            # Those values are on one line.
            found += left * (self.at(x) + self.at(x + step * (left - 1))) / 2
            done += left
        return found


class _RowCurves:
    """A curve for each profiled number of rows."""

    def __init__(self, points: Sequence[tuple[int, float, float]]) -> None:
        """`points`: rows, x and y."""
        self._rows = sorted({rows for rows, _, _ in points})
        self._curves = [
            Curve([(x, y) for rows, x, y in points if rows == row]) for row in self._rows
        ]

    def near(self, rows: float, x: float = 0.0) -> list[tuple[Curve, float]]:
        """The curves that count at so many rows, with their weights. Beyond the profile a further
        row takes as long as at `x`."""
        index = bisect_right(self._rows, rows)
        if index == 0:
            return [(self._curves[0], 1.0)]
        low = self._rows[index - 1]
        if index == len(self._rows):
            if index == 1:
                return [(self._curves[0], rows / low)]
            return [(self._curves[-1], 1.0), (self._further_row(x), rows - low)]
        part = (rows - low) / (self._rows[index] - low)
        below = (self._curves[index - 1], 1 - part)
        return [below, (self._curves[index], part)] if part else [below]

    def _further_row(self, x: float) -> Curve:
        """Time that one row adds beyond two or more profiled numbers of rows. It is not the time by
        row: a step has a constant part, which does not grow with the rows."""
        (low, high), (one, other) = self._rows[-2:], self._curves[-2:]
        return Curve([(0.0, max(0.0, (other.at(x) - one.at(x)) / (high - low)))])


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCost:
    """The time of a switch."""

    seconds: float
    kv: KvHandling
    """The cheaper way."""


class LatencyPredictor:
    """Seconds of what an engine does, by the size of its tensor-parallel groups."""

    def __init__(self, profile: DecodeProfile) -> None:
        """Raises InvalidRequestError: a size of the engine's groups has no point."""
        self.profile = profile
        self.sizes = profile.subject.tp_sizes
        by_size: dict[int, list[ProfilePoint]] = {size: [] for size in self.sizes}
        for point in profile.points:
            by_size[point.tp].append(point)
        for size, points in by_size.items():
            if not points:
                raise InvalidRequestError(
                    f"the profile has no point of tp {size}: call `rollout.profile_decoding` with "
                    "the same file again, which goes on where it ended"
                )
        self._steps = {
            size: _RowCurves([(point.rows, point.kv_tokens, point.step_s) for point in points])
            for size, points in by_size.items()
        }
        self._prefills = {
            size: _RowCurves(
                [(point.rows, point.prompt_tokens, point.prefill_s) for point in points]
            )
            for size, points in by_size.items()
        }

    def step_s(self, tp: int, rows: int, tokens: float) -> float:
        """l(B, T; TP): one decode step of a group with `rows` rows that have `tokens` tokens."""
        return math.fsum(part * each.at(tokens) for each, part in self._steps[tp].near(rows))

    def steps_s(self, tp: int, rows: int, tokens: float, steps: int) -> float:
        """The sum of `steps` steps of which the first one has `tokens` tokens, and each further one
        one more of each row."""
        near = self._steps[tp].near(rows)
        return math.fsum(part * each.total(tokens, rows, steps) for each, part in near)

    def prefill_s(self, tp: int, rows: int, rms_tokens: float) -> float:
        """The KV cache of so many rows is computed (PAT Eq. 4); `rms_tokens` is the root mean
        square of their lengths (Eq. 3)."""
        # The length is that of each row, and so of a further one; `tokens` of a step are of all.
        near = self._prefills[tp].near(rows, rms_tokens)
        return math.fsum(part * each.at(rms_tokens) for each, part in near)

    def move_s(self, tp: int, new: int, tokens: float) -> float:
        """The KV cache of groups of `tp` ranks, of which the largest has `tokens` tokens, moves to
        groups of `new` ranks (PAT Eq. 1 and 2).

        A rank has 1/`tp` of the heads of its group's rows. It keeps what it needs: a part of these
        heads if groups join, a part of the rows if they divide. Only the rest moves; the paper
        moves all of it.
        """
        if self.profile.kv_bytes_per_s is None:
            return 0.0
        held = tokens * self.profile.subject.kv_token_bytes / tp
        moves = 1 - min(tp, new) / max(tp, new)
        return held * moves / self.profile.kv_bytes_per_s

    def switch_cost(self, move_s: float, prefill_s: float) -> SwitchCost:
        """min(T_move, T_recomp), and what each switch takes besides. A rank keeps its weights, of
        which it uses a part, so no weights move (PAT reshards them)."""
        migrates = move_s <= prefill_s
        return SwitchCost(
            seconds=self.profile.switch_s + (move_s if migrates else prefill_s),
            kv="migrate" if migrates else "recompute",
        )
