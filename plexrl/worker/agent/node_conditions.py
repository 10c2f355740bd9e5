"""What is wrong on a node now, for operators. The agent reports it to the scheduler."""

from collections.abc import Iterable

from plexrl.process.conditions import Condition
from plexrl.process.folders.folder_watch import Finding

PART_STUCK = "part_stuck"
STATEMANAGER_UNHEALTHY = "statemanager_unhealthy"


class NodeConditions:
    """The present conditions, and since when each one lasts."""

    def __init__(self) -> None:
        self._since: dict[Finding, float] = {}
        self._must_report = False

    def report_again(self) -> None:
        """Another scheduler listens: it knows none of the conditions."""
        self._must_report = bool(self._since)

    def update(self, found: Iterable[Finding], now: float) -> tuple[Condition, ...] | None:
        """All conditions, if they have changed; `now`: seconds since the epoch."""
        since = {finding: self._since.get(finding, now) for finding in found}
        if since.keys() == self._since.keys() and not self._must_report:
            return None
        self._since, self._must_report = since, False
        return tuple(
            Condition(code=code, message=message, since=at) for (code, message), at in since.items()
        )
