"""How many tokens unfinished rows are expected to draw.

PAT Alg. 1 takes the longest response for each row. That is what is used here too where no past
response was longer than a row is now. Otherwise the final lengths of the rows are past lengths
beyond their present ones, at quantiles that are spread evenly over the rows: so some of them end
early and some late, as they will. With the mean for each row all rows of a batch would end
together, and with the longest response none before the end. `benchmarks/adaptive_tp.py` compares
them with a controller that knows all lengths.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from plexrl.rollout.policies.adaptive_tp.remaining import UnfinishedRow

SPREAD = (5**0.5 - 1) / 2
"""The fractional parts of its multiples are spread evenly, however many there are."""


class DecodingRow(NamedTuple):
    """An unfinished row as the engine has it."""

    tokens: int
    """Prompt and drawn tokens."""
    drawn: int
    most: int
    """Most tokens that it may draw in all."""


def project(
    groups: Sequence[Sequence[DecodingRow]], past: Sequence[int]
) -> list[list[UnfinishedRow]]:
    """The rows of `groups` with what they are expected to draw still, at least one token each.
    `past` holds the lengths of complete responses, in any order."""
    ascending = sorted(past)
    ordered = sorted(
        (row.drawn, group, index)
        for group, rows in enumerate(groups)
        for index, row in enumerate(rows)
    )
    found = [[UnfinishedRow(row.tokens, 1) for row in rows] for rows in groups]
    for position, (drawn, group, index) in enumerate(ordered):
        row = groups[group][index]
        final = _final(ascending, drawn, (0.5 + position * SPREAD) % 1, row.most)
        found[group][index] = UnfinishedRow(row.tokens, max(1, final - drawn))
    return found


def bound(groups: Sequence[Sequence[DecodingRow]]) -> list[list[UnfinishedRow]]:
    """The rows as if each of them drew as many tokens as it may (PAT Alg. 1, L_max)."""
    return project(groups, ())


def _final(ascending: Sequence[int], drawn: int, quantile: float, most: int) -> int:
    """The past length beyond `drawn` at this quantile of them."""
    longer = bisect_right(ascending, drawn)
    if longer == len(ascending):
        return most
    return min(most, ascending[longer + int(quantile * (len(ascending) - longer))])
