"""The phases of an operation that has ended, from its row in the operation log. Pure."""

from collections.abc import Mapping
from typing import Any

MOVES = frozenset({"load", "offload", "snapshot"})
"""Kinds by which the scheduler moves a deployment's state: a run without phases."""

Span = tuple[float, float]
"""Start and end, seconds of the scheduler's clock."""


def phases(row: Mapping[str, Any]) -> list[tuple[str, Span]]:
    """Name and span of each phase that took any time, in order.

    Of a run only the lengths of its transfer and computation are known; the transfer is put first,
    and what is left of the run is the control plane's. The wait is told the same way: the context
    switches in it are put last.
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
