"""The size of tensor-parallel (TP) groups, chosen anew for each round (Flexes §4.2). Pure.

Short rounds have more samples than long ones, so that engines preempt more of them for want of KV
cache. A larger group has room for more cache, and spends more time on communication. So after each
round:

- more than 1.05 times the preemptions of the round before double the size;
- four rounds without preemption, one after the other, halve it, unless a profile says that the
  last samples of a round, which run alone, would take longer.

Rounds are compared with those of their kind, and each kind has its own size: a long round differs
from a short one at equal sizes already. The paper does not say what it compares. A size is one of
those given: powers of two within a node whose memory has room for the weights and the longest
sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from plexrl.errors import InvalidRequestError

RISE = 1.05
"""Ratio of preemptions beyond which the size is doubled."""
QUIET_ROUNDS = 4
"""Rounds without preemption after which the size is halved."""


@dataclass(slots=True, kw_only=True)
class HeldSize:
    """The size and the measurements of the rounds of one kind."""

    size: int
    """GPUs of a group."""
    preemptions: int | None = None
    """Preemptions of the latest round; None: there was none."""
    quiet: int = 0
    """Latest rounds without preemption since the size was last halved."""


@dataclass(slots=True, kw_only=True)
class HeldParallelism:
    """The sizes by kind of round; a kind that is missing has the default."""

    kinds: dict[str, HeldSize] = field(default_factory=dict)


class ParallelismPlanner:
    """Takes the preemptions of each round, and says the size for the next of its kind."""

    def __init__(
        self,
        sizes: Sequence[int],
        default: int,
        *,
        profile: Mapping[int, float] | None = None,
        held: HeldParallelism | None = None,
    ) -> None:
        """`sizes`: possible numbers of GPUs of a group. `default`: that of the first rounds.
        `profile`: measured seconds of a decode step of one sample by size; sizes that are missing
        are not compared. `held` is the state of an earlier planner, of which this becomes the
        owner.

        Raises:
            InvalidRequestError: the sizes are not each twice the one before, or `default` is none
                of them.
        """
        pairs = pairwise(sizes)
        if not sizes or sizes[0] < 1 or any(large != 2 * small for small, large in pairs):
            raise InvalidRequestError(f"sizes are {list(sizes)}: give each twice the one before")
        if default not in sizes:
            raise InvalidRequestError(f"the default size {default} is none of {list(sizes)}")
        self._sizes = tuple(sizes)
        self._default = default
        self._profile = {} if profile is None else profile
        self.held = HeldParallelism() if held is None else held

    def size(self, kind: str) -> int:
        """GPUs of a group in the next round of this kind."""
        held = self.held.kinds.get(kind)
        return self._default if held is None else held.size

    def observe(self, kind: str, preemptions: int) -> int:
        """A round of this kind had so many preemptions; the size of the next of its kind.

        Raises:
            InvalidRequestError: a negative number of preemptions.
        """
        if preemptions < 0:
            raise InvalidRequestError(f"{preemptions} preemptions: give a number of at least 0")
        held = self.held.kinds.setdefault(kind, HeldSize(size=self._default))
        before, held.preemptions = held.preemptions, preemptions
        if preemptions:
            held.quiet = 0
            if before is not None and preemptions > RISE * before:
                held.size = min(2 * held.size, self._sizes[-1])
            return held.size
        held.quiet += 1
        if held.quiet == QUIET_ROUNDS:
            held.quiet = 0
            half = max(held.size // 2, self._sizes[0])
            if not self._is_slower(half, held.size):
                held.size = half
        return held.size

    def _is_slower(self, size: int, other: int) -> bool:
        is_measured = size in self._profile and other in self._profile
        return is_measured and self._profile[size] > self._profile[other]
