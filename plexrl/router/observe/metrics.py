"""What is wrong with the cluster, as figures for Prometheus: the same as `/v1/health` tells."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class HealthCollector(Collector):
    """One look at the cluster's health."""

    def __init__(self, health: dict[str, Any], now: float) -> None:
        """`health` as `ClusterHealth.public` gives it; `now` in seconds since the epoch."""
        self._health = health
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """The figures."""
        health = self._health
        connected = GaugeMetricFamily(
            "plexrl_scheduler_connected", "1 while this router reaches a scheduler."
        )
        connected.add_metric([], health["scheduler"])
        yield connected
        holds = GaugeMetricFamily(
            "plexrl_condition_seconds",
            "For how long a condition that delays work has held; absent while there is none.",
            labels=["code"],
        )
        longest: dict[str, float] = {}
        for each in health["conditions"]:
            code = each["code"]
            longest[code] = max(longest.get(code, 0.0), self._now - each["since"])
        for code, seconds in sorted(longest.items()):
            holds.add_metric([code], seconds)
        yield holds
        restarts = CounterMetricFamily(
            "plexrl_part_restarts", "Parts of the cluster that were started again."
        )
        restarts.add_metric([], health["restarts"])
        yield restarts


def metrics_text(health: dict[str, Any], now: float) -> bytes:
    """The figures in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(HealthCollector(health, now))
    return generate_latest(registry)
