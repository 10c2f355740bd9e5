"""80 % intervals of estimated waits, from the errors of recent estimates. Pure.

An error is `actual - estimated`, in seconds: long errors come from a burst that goes first although
it was not expected, and such a burst is as long whether the wait was short or long. The interval of
the next wait is its estimate plus the errors of ranks `k` from below and above among the newest
`10 k - 1` (split conformal prediction, each side 10 %): while waits keep their nature, 80 % of them
start inside. `k` is small, so that the errors of a job's first cycles, of which little
is known, are soon replaced. Without enough errors, the interval is from half to twice the estimate.

Where the nature of errors changes, as on a cluster that fills up, earlier errors tell too little.
`adapted_interval` is for estimates that can be compared with what came of them: each one outside
its interval makes the next ones wider, each one inside makes them a little narrower (adaptive
conformal inference, Gibbs and Candès 2021).
"""

from collections.abc import Sequence
from typing import Final

EACH_SIDE: Final = 10
"""One wait in this many may start before the interval, and one after it."""
GROUP_ERRORS: Final = 29
"""Kept errors of a group."""
CLUSTER_ERRORS: Final = 59
"""Kept errors of all groups, for groups with few."""
ERRORS_MIN: Final = 9
"""Fewest errors that are used: the interval then is between the smallest and the largest."""
COLD_FACTOR: Final = 2.0
"""Without errors: from the estimate divided by this to the estimate times this."""
OUTSIDE: Final = 0.2
"""Part of the outcomes that may lie outside an 80 % interval."""
OUTSIDE_MAX: Final = 0.5
"""Largest part that an adapted interval leaves out."""
PACE: Final = 0.1
"""By how much an outcome changes that part, relative to the surprise."""


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
    rank = (len(errors) + 1) // EACH_SIDE
    if rank == 0:
        return estimated_s / COLD_FACTOR, estimated_s * COLD_FACTOR
    ordered = sorted(errors[1 - EACH_SIDE * rank :])
    low_s, high_s = ordered[rank - 1], ordered[-rank]
    return max(0.0, estimated_s + low_s), max(0.0, estimated_s + high_s)


def adapted(shift: float, *, is_inside: bool) -> float:
    """By how much the next adapted interval leaves out more than `OUTSIDE`, after one more outcome;
    `shift` is what it was before it, at first 0."""
    surprise = OUTSIDE if is_inside else OUTSIDE - 1.0
    return min(OUTSIDE_MAX - OUTSIDE, max(-OUTSIDE, shift + PACE * surprise))


def adapted_interval(
    errors: Sequence[float], estimated_s: float, outside: float
) -> tuple[float, float]:
    """The interval that leaves out the part `outside` of the `errors`, half of it on each side. If
    that is less than one error, the interval goes beyond the outermost one, by up to the distance
    between the two."""
    if len(errors) < ERRORS_MIN:
        return estimated_s / COLD_FACTOR, estimated_s * COLD_FACTOR
    ordered = sorted(errors)
    rank = (len(ordered) + 1) * outside / 2.0
    low_s, high_s = ordered[0], ordered[-1]
    if rank < 1.0:
        beyond_s = (1.0 - rank) * (high_s - low_s)
        low_s, high_s = low_s - beyond_s, high_s + beyond_s
    else:
        # A rank that is whole may be a rounding error below it.
        whole = int(rank + 1e-9)
        low_s, high_s = ordered[whole - 1], ordered[-whole]
    return max(0.0, estimated_s + low_s), max(0.0, estimated_s + high_s)
