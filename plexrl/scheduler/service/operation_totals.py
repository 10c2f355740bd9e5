"""Counts the operations that have ended since this scheduler's start, by kind and state."""

from plexrl.scheduler.state.operation import Operation
from plexrl.wire.messages.overview_views import OperationTotalsView

Key = tuple[str, str]
"""Kind and state."""


class OperationTotals:
    """Sums that only grow. The core forgets jobs and operations, so its own sums shrink."""

    def __init__(self) -> None:
        self._totals: dict[Key, OperationTotalsView] = {}

    def add(self, operation: Operation) -> None:
        """Count an operation that is final."""
        key = operation.kind.value, operation.state.value
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = _none(*key)
        totals["operations"] += 1
        totals["tokens"] += operation.tokens
        totals["queue_s"] += operation.queue_s or 0.0
        totals["switch_s"] += operation.switch_s
        if operation.started_at is not None and operation.finished_at is not None:
            totals["run_s"] += operation.finished_at - operation.started_at

    def views(self) -> list[OperationTotalsView]:
        """The sums, sorted by kind and state."""
        return [self._totals[key] for key in sorted(self._totals)]


def _none(kind: str, state: str) -> OperationTotalsView:
    return {
        "kind": kind,
        "state": state,
        "operations": 0,
        "tokens": 0,
        "queue_s": 0.0,
        "switch_s": 0.0,
        "run_s": 0.0,
    }
