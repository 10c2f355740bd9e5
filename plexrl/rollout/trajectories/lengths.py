"""Lengths of responses: the expected ones by prompt, and the latest ones."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from plexrl.rollout.trajectories.record import SampleGroupId

RECENT_MAX = 1024
"""Latest responses of which the lengths are kept."""


class RankedLength(NamedTuple):
    """A response whose length was predicted."""

    expected: int
    """Tokens that were expected, 1 or more."""
    tokens: int


@dataclass(slots=True, kw_only=True)
class HeldDivision:
    """The latest division of the instances between long prompts and the others."""

    prompts: int = 0
    """Number of prompts that had been added when it was chosen."""
    instances: int = 0
    """Number of instances then."""
    long: int = 0
    """Instances for long prompts; 0: all serve all."""


@dataclass(slots=True, kw_only=True)
class Lengths:
    """Its size is bounded by what is in flight."""

    expected: dict[SampleGroupId, int] = field(default_factory=dict)
    """Tokens of a response to each prompt in flight for which they were predicted."""
    recent: list[int] = field(default_factory=list)
    """Tokens of the latest trained responses, the latest one last."""
    ranked: list[RankedLength] = field(default_factory=list)
    """The latest trained responses whose lengths were predicted, the latest one last."""
    division: HeldDivision = field(default_factory=HeldDivision)

    def expect(self, group: SampleGroupId, tokens: int) -> None:
        """A prompt has this expected length; 0: it is not known."""
        if tokens:
            self.expected[group] = tokens

    def trained(self, group: SampleGroupId, tokens: int) -> None:
        """A response to this prompt is trained. Those of a batch count together: the first ones
        that end are the shortest, and would make all others seem short."""
        self.recent.append(tokens)
        del self.recent[:-RECENT_MAX]
        if (expected := self.expected.get(group)) is not None:
            self.ranked.append(RankedLength(expected, tokens))
            del self.ranked[:-RECENT_MAX]

    def forget(self, group: SampleGroupId) -> None:
        """A prompt is not in flight any more."""
        self.expected.pop(group, None)

    @property
    def growth(self) -> float:
        """Half of the mean past length: tokens by which a response has grown on average while it is
        generated; 0: none is known."""
        return sum(self.recent) / len(self.recent) / 2 if self.recent else 0.0

    def tokens_left(self, drawn: Iterable[int]) -> float:
        """Tokens that responses of which so many are drawn are expected to draw still, in all: up
        to the mean of the past lengths beyond; as many again, if no past response was longer."""
        past = sorted(self.recent)
        sums = [0, *accumulate(reversed(past))]
        total = 0.0
        for tokens in drawn:
            longer = len(past) - bisect_right(past, tokens)
            total += sums[longer] / longer - tokens if longer else tokens
        return total
