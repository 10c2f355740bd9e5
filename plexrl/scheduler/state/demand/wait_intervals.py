"""80 % intervals of estimated waits, from the errors of recent estimates. Pure.

An error is `actual - estimated`, in seconds: long errors come from a burst that goes first although
it was not expected, and such a burst is as long whether the wait was short or long. The interval of
the next wait is its estimate plus the errors of ranks `floor(0.1 · (n + 1))` and
`n + 1 - floor(0.1 · (n + 1))` among the newest `n` (split conformal prediction, each side 10 %): as
long as waits do not change their nature, 80 % of them start inside. Without enough errors, the
interval is from half to twice the estimate.
"""

from collections.abc import Sequence
from typing import Final

SIDE: Final = 0.1
"""Part of the waits that may start before the interval, and part that may start after it."""
GROUP_ERRORS: Final = 50
"""Kept errors of a group."""
CLUSTER_ERRORS: Final = 100
"""Kept errors of all groups, for groups with few."""
ERRORS_MIN: Final = 19
"""Fewest errors that are used: the ranks then are the second and the last but one."""
COLD_FACTOR: Final = 2.0
"""Without errors: from the estimate divided by this to the estimate times this."""


def keep(errors: list[float], new: float, most: int) -> None:
    """Append an error, and forget the oldest above `most`."""
    errors.append(new)
    if len(errors) > most:
        del errors[0]


def interval(
    of_group: Sequence[float], of_cluster: Sequence[float], estimated_s: float
) -> tuple[float, float]:
    """Shortest and longest expected wait in seconds. The errors of the group are used if there are
    enough, else those of the cluster."""
    errors = of_group if len(of_group) >= ERRORS_MIN else of_cluster
    count = len(errors)
    if count < ERRORS_MIN:
        return estimated_s / COLD_FACTOR, estimated_s * COLD_FACTOR
    ordered = sorted(errors)
    rank = int(SIDE * (count + 1))
    low_s, high_s = ordered[rank - 1], ordered[count - rank]
    return max(0.0, estimated_s + low_s), max(0.0, estimated_s + high_s)
