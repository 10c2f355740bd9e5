"""The loads at which an engine's decode steps are measured (PAT §4.2). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 60
"""Decode steps of each load, as in the paper."""
PASS_TOKENS = 2048
"""Prompt tokens that an engine computes in one pass, about: rows whose prompts come later begin
later, and only steps of all rows count."""
SHORTEST = 8
DENSE_BELOW = 512
"""Contexts double up to this length and are four times as long above it: at short ones the time of
a step is less regular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """A load of each group."""

    tp: int
    rows: int
    prompt_tokens: int
    draws: int
    """Tokens that each row draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """The room of an engine."""

    tp_sizes: tuple[int, ...]
    samples_max: int
    """Rows that run at once, in all groups."""
    sequence_tokens_max: int
    kv_tokens: int
    """Tokens in the KV cache of all groups."""
    block_tokens: int

    def fits(self, point: GridPoint) -> bool:
        """Whether all rows of a load run at the same time: B·L ≤ T_cap of the paper."""
        groups = self.tp_sizes[-1] // point.tp
        blocks = -(-(point.prompt_tokens + point.draws) // self.block_tokens)
        # An engine keeps a spare block for every eight rows.
        held = point.rows * blocks + -(-point.rows // 8) + 1
        return (
            point.rows * groups <= self.samples_max
            and point.prompt_tokens + point.draws <= self.sequence_tokens_max
            and held * self.block_tokens * groups <= self.kv_tokens
        )


def grid(size: EngineSize) -> list[GridPoint]:
    """The loads, in the order of measuring: at first those that are far apart, so that a profile
    that ends early covers all of the range."""
    contexts = [
        *_doubling(SHORTEST, min(DENSE_BELOW, size.sequence_tokens_max), 2),
        *_doubling(4 * DENSE_BELOW, size.sequence_tokens_max, 4),
    ]
    found: list[tuple[tuple[int, ...], GridPoint]] = []
    for tp in size.tp_sizes:
        rows = _doubling(1, size.samples_max * tp // size.tp_sizes[-1], 2)
        for row_level, count in zip(_levels(len(rows)), rows, strict=True):
            for level, tokens in zip(_levels(len(contexts)), contexts, strict=True):
                draws = STEPS + -(-count * tokens // PASS_TOKENS)
                point = GridPoint(tp=tp, rows=count, prompt_tokens=tokens, draws=draws)
                if size.fits(point):
                    depth = max(row_level, level), row_level + level, row_level
                    found.append(((*depth, tokens, count, tp), point))
    return [point for _, point in sorted(found, key=lambda each: each[0])]


def _doubling(first: int, last: int, factor: int) -> list[int]:
    found: list[int] = []
    while first <= last:
        found.append(first)
        first *= factor
    return found


def _levels(count: int) -> Sequence[int]:
    """The depth of each of so many places: how often the range is halved until it is reached; 0 at
    the"""
    levels = [0] * count
    ranges = [(0, count - 1, 1)]
    while ranges:
        first, last, level = ranges.pop()
        if last - first > 1:
            middle = (first + last) // 2
            levels[middle] = level
            ranges += [(first, middle, level + 1), (middle, last, level + 1)]
    return levels
