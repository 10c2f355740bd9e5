"""Adaptive timeouts of test cases (Flexes §4.3).

A correct program is rarely much slower than the slowest correct one so far. So a program that runs
for longer is ended early, long before the fixed timeout.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutSettings:
    """How the timeout of a test case follows from its slowest correct run."""

    factor: float = 1.5
    """λ. More than 1: the machine may be busier than at that run."""
    min_s: float = 2.0
    """No timeout is shorter, since short runs vary most."""
    max_s: float = 30.0
    """No timeout is longer. It is also that of a test case without a correct run."""

    def __post_init__(self) -> None:
        problem = None
        if not (math.isfinite(self.factor) and self.factor >= 1.0):
            problem = f"factor is {self.factor}: give at least 1"
        if not 0.0 < self.min_s <= self.max_s < math.inf:
            problem = f"min_s is {self.min_s}, max_s is {self.max_s}: give 0 < min_s <= max_s"
        if problem is not None:
            raise InvalidRequestError(f"timeouts of test cases: {problem}")


class AdaptiveTimeouts:
    """The slowest correct run of each test case, and the timeouts that follow."""

    def __init__(self, settings: TimeoutSettings, slowest_s: Mapping[str, float]) -> None:
        """`slowest_s`: by test case, from earlier runs of the controller."""
        self.settings = settings
        self._slowest_s = dict(slowest_s)

    def timeout_s(self, test: str) -> float:
        """min(max(min_s, factor x slowest correct run), max_s)."""
        anchor = self._slowest_s.get(test, math.inf)
        settings = self.settings
        return min(max(settings.min_s, settings.factor * anchor), settings.max_s)

    def passed(self, test: str, wall_s: float) -> bool:
        """Note a correct run; true if it is the slowest one so far."""
        is_slowest = wall_s > self._slowest_s.get(test, -math.inf)
        if is_slowest:
            self._slowest_s[test] = wall_s
        return is_slowest
