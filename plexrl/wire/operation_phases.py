"""Computes the phases of a finished operation from its row in the operation log. Pure."""

from collections.abc import Mapping
from typing import Any

MOVES = frozenset({"load", "offload", "snapshot"})
"""Kinds that move a deployment's state; their run has a single phase."""

Span = tuple[float, float]
"""Start and end, in seconds of the scheduler's clock."""


def phases(row: Mapping[str, Any]) -> list[tuple[str, Span]]:
    """Name and span of each phase with a duration above 0, in order.

    The log has only the durations of a run's transfer and computation. The transfer is assumed to
    come first, and the rest of the run is overhead of the control plane. Likewise, context switches
    are assumed to be at the end of the wait.
    """
    submitted, started, finished = row["submitted_at"], row["started_at"], row["finished_at"]
    if started is None:
        found = [("queue", (submitted, finished))]
    elif row["kind"] in MOVES:
        found = [("move", (started, finished))]
    else:
        switching = started - row["switch_s"]
        sent = min(started + row["transfer_s"], finished)
        computed = min(sent + (row["compute_s"] or 0.0), finished)
        found = [
            ("queue", (submitted, switching)),
            ("switch", (switching, started)),
            ("transfer", (started, sent)),
            ("compute", (sent, computed)),
        ]
    return [(name, (start, end)) for name, (start, end) in found if end > start]
