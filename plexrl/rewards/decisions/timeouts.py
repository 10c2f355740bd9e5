"""Adaptive timeouts of test cases (Flexes §4.3).

A correct program is rarely much slower than the slowest correct one so far. So a program that runs
for longer is ended early, long before the fixed timeout.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers


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
        given = {"factor": self.factor, "min_s": self.min_s, "max_s": self.max_s}
        check_numbers("sandbox", given)
        if self.min_s > self.max_s:
            raise InvalidRequestError(
                f"timeouts of test cases: min_s is {self.min_s}, max_s is {self.max_s}: give "
                "min_s <= max_s"
            )


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
