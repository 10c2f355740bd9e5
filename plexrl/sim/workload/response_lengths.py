"""Rollouts that the longest of their responses ends, and the training work that all of them make.

The lengths of a rollout's n responses are taken to be independent, of one law F. Its longest is
drawn at once, as the quantile at u^(1/n); given that, the others are independent draws from the law
cut off there, so their sum has (n - 1) times its mean and variance, both exact. The sum's law is
taken to be lognormal, which is coarse for a handful of responses only. Long rollouts so have many
tokens, as much as the law of lengths says.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from plexrl.errors import InvalidRequestError
from plexrl.traces.bundled import bundled
from plexrl.traces.formats import read_histogram
from plexrl.traces.generate.distributions import Law
from plexrl.traces.generate.length_model import fit_lengths
from plexrl.traces.sources import open_trace

R1 = "r1"
"""Name of the bundled law: lengths that DeepSeek R1 served."""

BODY_PARTS = 400
TAIL_OCTAVES = 20
"""By which the last part of the law is halved: the longest of a million responses lies inside."""
TAIL_PARTS = 8
"""Of an octave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestOf:
    """n responses of a law: what their longest and their sum are, by those of the mean rollout."""

    responses: int
    parts: tuple[float, ...]
    """Ascending from 0 to 1; between them the law's quantile is linear."""
    lengths: tuple[float, ...]
    """At the parts."""
    sums: tuple[float, ...]
    """Of the lengths up to each part: their integral over the parts."""
    squares: tuple[float, ...]
    """The same of the squared lengths."""
    longest_mean: float

    @property
    def mean(self) -> float:
        """Of one response."""
        return self.sums[-1]

    def draw(self, uniform: float, normal: float) -> tuple[float, float]:
        """(longest, sum) of one rollout, each by its mean, from a number between 0 and 1 and a
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


def longest_of(responses: int, law: Law) -> LongestOf:
    """Of so many responses with lengths of this law.

    Raises:
        InvalidRequestError: all of the law's lengths are 0.
    """
    parts = _parts()
    lengths = tuple(law.quantile(part) for part in parts)
    sums, squares, longest_mean = [0.0], [0.0], 0.0
    for (begin, low), (end, high) in pairwise(zip(parts, lengths, strict=True)):
        sums.append(sums[-1] + (end - begin) * (low + high) / 2.0)
        squares.append(squares[-1] + (end - begin) * _square_mean(low, high))
        # The integral of the linear quantile over the longest's law, part^n.
        slope = (high - low) / (end - begin)
        weight = end**responses - begin**responses
        risen = (end ** (responses + 1) - begin ** (responses + 1)) * responses / (responses + 1)
        longest_mean += low * weight + slope * (risen - begin * weight)
    if sums[-1] <= 0.0:
        raise InvalidRequestError(
            "response lengths that are all 0 make no rollout: use another law"
        )
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
    """As `longest_of`, of the law that `Behaviour.lengths` names; files are read once.

    Raises:
        InvalidRequestError: there is no such trace, or it holds no response lengths.
    """
    if lengths == R1:
        return longest_of(responses, read_histogram(bundled("r1-lengths")))
    source = open_trace(lengths)
    if source.table.name != "lengths":
        raise InvalidRequestError(
            f"{lengths} holds {source.table.name}, not response lengths: name a trace of these, or "
            f"{R1!r}"
        )
    return longest_of(responses, fit_lengths(source.rows).fit.law)


def _parts() -> tuple[float, ...]:
    """Equal steps, and near 1, where the longest of many lies, ever smaller ones."""
    step = 1.0 / BODY_PARTS
    body = [index * step for index in range(BODY_PARTS)]
    tail = [
        1.0 - step * 2.0 ** (-index / TAIL_PARTS) for index in range(1, TAIL_OCTAVES * TAIL_PARTS)
    ]
    return (*body, *tail, 1.0)


def _square_mean(low: float, high: float) -> float:
    """Of numbers spread evenly from `low` to `high`."""
    return (low * low + low * high + high * high) / 3.0
