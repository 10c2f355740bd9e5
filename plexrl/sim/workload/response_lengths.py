"""Draws the longest response of a rollout and the total length of all its responses.

The n response lengths of a rollout are assumed independent with distribution F. The longest is
drawn directly, as the quantile at u^(1/n). Given the longest, the others are independent draws from
F truncated there, so their sum has (n - 1) times the truncated mean and variance, both exact. The
sum is drawn as lognormal, which is inaccurate only for a few responses. Long rollouts thus have
many tokens, as the distribution of lengths implies.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from plexrl.errors import InvalidRequestError
from plexrl.traces.bundled import bundled
from plexrl.traces.formats import read_histogram
from plexrl.traces.generate.distributions import Distribution
from plexrl.traces.generate.length_model import fit_lengths
from plexrl.traces.sources import open_trace

R1 = "r1"
"""Name of the bundled distribution: response lengths of DeepSeek R1."""

BODY_PARTS = 400
TAIL_OCTAVES = 20
"""Number of halvings of the last part: they cover the longest of a million responses."""
TAIL_PARTS = 8
"""Points per octave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestOf:
    """Draws the maximum and the sum of n response lengths, relative to those of the mean
    rollout."""

    responses: int
    parts: tuple[float, ...]
    """Probabilities, ascending from 0 to 1; the quantile is linear in between."""
    lengths: tuple[float, ...]
    """Quantiles at `parts`."""
    sums: tuple[float, ...]
    """Integral of the quantile up to each part."""
    squares: tuple[float, ...]
    """Integral of the squared quantile up to each part."""
    longest_mean: float

    @property
    def mean(self) -> float:
        """Mean length of one response."""
        return self.sums[-1]

    def draw(self, uniform: float, normal: float) -> tuple[float, float]:
        """(longest, sum) of one rollout, each divided by its mean, from a uniform number and a
        standard normal one."""
        count = self.responses
        part = uniform ** (1.0 / count)
        at = min(bisect_right(self.parts, part), len(self.parts) - 1)
        begin = self.parts[at - 1]
        within = (part - begin) / (self.parts[at] - begin)
        low = self.lengths[at - 1]
        longest = low + within * (self.lengths[at] - low)
        others = count - 1
        total = longest
        if others:
            span = part - begin
            upto = self.sums[at - 1] + span * (low + longest) / 2.0
            squares = self.squares[at - 1] + span * _square_mean(low, longest)
            if upto > 0.0:
                mean = upto / part
                spread = max(0.0, squares / part - mean * mean) / (others * mean * mean)
                sigma_squared = math.log1p(spread)
                factor = math.exp(math.sqrt(sigma_squared) * normal - sigma_squared / 2.0)
                total += others * mean * factor
        return longest / self.longest_mean, total / (count * self.sums[-1])


def longest_of(responses: int, distribution: Distribution) -> LongestOf:
    """The draws for `responses` responses with lengths of distribution `distribution`.

    Raises:
        InvalidRequestError: all lengths are 0.
    """
    parts = _parts()
    lengths = tuple(distribution.quantile(part) for part in parts)
    sums, squares, longest_mean = [0.0], [0.0], 0.0
    for (begin, low), (end, high) in pairwise(zip(parts, lengths, strict=True)):
        sums.append(sums[-1] + (end - begin) * (low + high) / 2.0)
        squares.append(squares[-1] + (end - begin) * _square_mean(low, high))
        # The integral of the linear quantile over the distribution of the maximum, part^n.
        slope = (high - low) / (end - begin)
        weight = end**responses - begin**responses
        risen = (end ** (responses + 1) - begin ** (responses + 1)) * responses / (responses + 1)
        longest_mean += low * weight + slope * (risen - begin * weight)
    if sums[-1] <= 0.0:
        raise InvalidRequestError("all response lengths are 0: use another distribution of lengths")
    return LongestOf(
        responses=responses,
        parts=parts,
        lengths=lengths,
        sums=tuple(sums),
        squares=tuple(squares),
        longest_mean=longest_mean,
    )


@lru_cache(maxsize=16)
def read_longest_of(responses: int, lengths: str) -> LongestOf:
    """Like `longest_of`, for the distribution that `Behaviour.lengths` names; files are read once.

    Raises:
        InvalidRequestError: the trace does not exist, or does not contain response lengths.
    """
    if lengths == R1:
        return longest_of(responses, read_histogram(bundled("r1-lengths")))
    source = open_trace(lengths)
    if source.table.name != "lengths":
        raise InvalidRequestError(
            f"{lengths} contains {source.table.name}, not response lengths: use a trace of lengths "
            f"or {R1!r}"
        )
    return longest_of(responses, fit_lengths(source.rows).fit.distribution)


def _parts() -> tuple[float, ...]:
    """Probabilities in equal steps, and in geometrically smaller steps near 1."""
    step = 1.0 / BODY_PARTS
    body = [index * step for index in range(BODY_PARTS)]
    tail = [
        1.0 - step * 2.0 ** (-index / TAIL_PARTS) for index in range(1, TAIL_OCTAVES * TAIL_PARTS)
    ]
    return (*body, *tail, 1.0)


def _square_mean(low: float, high: float) -> float:
    """Mean square of numbers that are uniform between `low` and `high`."""
    return (low * low + low * high + high * high) / 3.0
