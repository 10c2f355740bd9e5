"""Counts the deployments on each GPU: a GPU is held from its first deployment to its last. Pure.

GPUs that a deployment takes together are a *lot*, which has the name of the deployment's group.
Groups may be divided later, and a lot may end GPU by GPU.
"""

from collections import Counter
from dataclasses import dataclass

from plexrl.sim.metrics.collector import Collector
from plexrl.sim.workload.job_run import RolloutWorkers, WorkerGroup

Gpu = tuple[str, int]
"""Node and index."""


@dataclass(slots=True)
class _Held:
    lot: str
    rolls_out: bool
    """A rollout took it."""
    deployments: int = 0


class GroupMembers:
    """The deployments on each GPU."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._held: dict[Gpu, _Held] = {}
        self._lots: Counter[str] = Counter()
        """Lots so far by group."""

    def put(self, run: WorkerGroup, group: str, gpus: tuple[Gpu, ...], now: float) -> None:
        """Move the deployment to these GPUs, which are those of its group, or a part of them."""
        if (run.group, run.held) == (group, gpus):
            return
        self.remove(run, now)
        run.group, run.held = group, gpus
        free = [gpu for gpu in gpus if gpu not in self._held]
        if free:
            self._lots[group] += 1
            lot = group if self._lots[group] == 1 else f"{group} ({self._lots[group]})"
            rolls_out = isinstance(run, RolloutWorkers)
            self._collector.group_made(lot, len(free), now, rolls_out=rolls_out)
            self._held.update((gpu, _Held(lot, rolls_out)) for gpu in free)
        for gpu in gpus:
            self._held[gpu].deployments += 1
        run.rollout_part = sum(self._held[gpu].rolls_out for gpu in gpus) / len(gpus)

    def remove(self, run: WorkerGroup, now: float) -> None:
        """Take the deployment off its GPUs, if it has any."""
        gone: Counter[str] = Counter()
        for gpu in run.held:
            held = self._held[gpu]
            held.deployments -= 1
            if not held.deployments:
                gone[held.lot] += 1
                del self._held[gpu]
        for lot, count in gone.items():
            self._collector.group_gone(lot, count, now)
        run.group, run.held = "", ()
