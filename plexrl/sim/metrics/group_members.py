"""Counts the members of each group: a group begins with its first member and ends with its last.
Pure."""

from plexrl.sim.metrics.collector import Collector
from plexrl.sim.workload.job_run import Rollouts, WorkerGroup


class GroupMembers:
    """Member counts of all live groups."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._counts: dict[str, int] = {}

    def put(self, run: WorkerGroup, group: str, now: float) -> None:
        """Move the deployment to this group (empty: to none)."""
        if run.group == group:
            return
        if run.group:
            self._counts[run.group] -= 1
            if not self._counts[run.group]:
                del self._counts[run.group]
                self._collector.group_gone(run.group, run.gpus, now)
        run.group = group
        if not group:
            return
        if group not in self._counts:
            self._counts[group] = 0
            self._collector.group_made(group, run.gpus, now, rolls_out=isinstance(run, Rollouts))
        self._counts[group] += 1
