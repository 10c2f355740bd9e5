"""The asynchronous rollouts of the cluster, for operators, tenants and Prometheus."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plexrl.errors import NotFoundError, PlexRLError
from plexrl.router.execution.rollout_link import RolloutLink
from plexrl.wire.messages.rollout_views import Rollouts, RolloutStatus
from plexrl.wire.messages.views import RolloutWaitView

CACHE_S = 2.0
"""Requests within this time share one answer of the rollout service."""
TIMEOUT_S = 5.0


class RolloutViews:
    """Asks the rollout service at most once in `CACHE_S` seconds, whatever the number of
    requests."""

    def __init__(self, link: RolloutLink) -> None:
        self._link = link
        self._asking: asyncio.Task[list[RolloutStatus]] | None = None
        self._asked_at = -CACHE_S

    async def views(self) -> list[RolloutStatus]:
        """The state of each rollout, as `GET /v1/jobs/{job}/rollouts/{name}` answers it.

        Raises:
            NotFoundError: the cluster has no rollout service.
            PlexRLError: it does not answer.
        """
        now = time.monotonic()
        if self._asking is None or (self._asking.done() and now - self._asked_at >= CACHE_S):
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> list[RolloutStatus]:
        reply: Rollouts = await self._link.call("list", {"job": None}, timeout_s=TIMEOUT_S)
        return reply["rollouts"]

    async def waits(self, job: str) -> list[RolloutWaitView] | None:
        """What each rollout of the job waits for; None: the rollout service does not answer."""
        try:
            found = await self.views()
        except NotFoundError:
            return []
        except PlexRLError:
            return None
        return [
            {"rollout": each["name"], "waits_for": each["waits_for"]}
            for each in found
            if each["job"] == job
        ]

    async def metrics(self) -> "RolloutCollector":
        """The metrics of all rollouts."""
        try:
            return RolloutCollector(await self.views(), is_connected=True)
        except NotFoundError:
            return RolloutCollector([], is_connected=None)
        except PlexRLError:
            return RolloutCollector([], is_connected=False)


class RolloutCollector(Collector):
    """Metrics of the present rollouts, without names: they need no key. A rollout ends with its
    job, so all are gauges."""

    def __init__(self, views: list[RolloutStatus], *, is_connected: bool | None) -> None:
        """`is_connected` is whether the service has answered; None: the cluster has none."""
        self._views = views
        self._is_connected = is_connected

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        if self._is_connected is None:
            return
        yield _total(
            "plexrl_rollout_service_connected",
            "1 while the rollout service answers this router.",
            self._is_connected,
        )
        if not self._is_connected:
            return
        yield from self._work()
        yield from self._instances()
        seen: Counter[str] = Counter()
        for view in self._views:
            seen.update(view["staleness_seen"])
        yield _by_label(
            "plexrl_rollout_trained_trajectories",
            "Trained trajectories of the present rollouts by their staleness in versions.",
            "staleness",
            seen,
        )

    def _work(self) -> Iterator[Metric]:
        """What the rollouts generate and have ready."""
        views = self._views
        yield _total(
            "plexrl_rollout_batches_ready",
            "Complete batches that no trainer has taken.",
            sum(view["batches_ready"] for view in views),
        )
        yield _total(
            "plexrl_rollout_trajectories",
            "Trajectories in flight.",
            sum(view["in_flight"] for view in views),
        )
        yield _total(
            "plexrl_rollout_tokens_per_second",
            "Generated tokens per second.",
            sum(view["tokens_per_s"] for view in views),
        )
        yield _by_label(
            "plexrl_rollouts",
            "Asynchronous rollouts by state.",
            "state",
            Counter(view["state"] for view in views),
        )

    def _instances(self) -> Iterator[Metric]:
        """The rollouts' instances: how many, their pulls, and those that came and went."""
        instances = [instance for view in self._views for instance in view["instances"].values()]
        yield _by_label(
            "plexrl_rollout_instances",
            "Rollout instances by state.",
            "state",
            Counter(instance["state"] for instance in instances),
        )
        yield _total(
            "plexrl_rollout_pull_pause_seconds",
            "Seconds without tokens for new weights.",
            sum(instance["pause_s"] for instance in instances),
        )
        yield _total(
            "plexrl_rollout_pull_transfer_seconds",
            "Seconds of fetching new weights beside generations.",
            sum(instance["transfer_s"] for instance in instances),
        )
        changes = {
            "added": sum(view["instances_added"] for view in self._views),
            "removed": sum(view["instances_removed"] for view in self._views),
        }
        yield _by_label(
            "plexrl_rollout_instance_changes",
            "Instances that the present rollouts have added and removed.",
            "change",
            Counter(changes),
        )


def _total(name: str, help_text: str, value: float) -> Metric:
    metric = GaugeMetricFamily(name, help_text)
    metric.add_metric([], value)
    return metric


def _by_label(name: str, help_text: str, label: str, counts: Counter[str]) -> Metric:
    found = GaugeMetricFamily(name, help_text, labels=[label])
    for value, count in sorted(counts.items()):
        found.add_metric([value], count)
    return found
