"""Splits the operation log of a deployment into training cycles. Pure."""

from collections.abc import Sequence

from plexrl.traces.convert.history import PastRun

CYCLE_ENDS = ("publish", "optim_step", "forward")
"""Kinds of operation that end a cycle; the first kind that occurs in the log applies."""


def split_cycles(runs: Sequence[PastRun]) -> tuple[list[list[PastRun]], list[PastRun]]:
    """The whole cycles, oldest first, and the runs after the last of them; `runs` in order."""
    kinds = {run.kind for run in runs}
    last = next((kind for kind in CYCLE_ENDS if kind in kinds), None)
    cycles: list[list[PastRun]] = []
    rest: list[PastRun] = []
    for run in runs:
        rest.append(run)
        if run.kind == last:
            cycles.append(rest)
            rest = []
    return cycles, rest
