"""Prometheus metrics: the cluster's health, with the same content as `/v1/health`."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class HealthCollector(Collector):
    """Metrics of one health check."""

    def __init__(self, health: dict[str, Any], now: float) -> None:
        """`health` is from `ClusterHealth.public`; `now` is in seconds since the epoch."""
        self._health = health
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        health = self._health
        connected = GaugeMetricFamily(
            "plexrl_scheduler_connected", "1 while this router is connected to a scheduler."
        )
        connected.add_metric([], health["scheduler"])
        yield connected
        holds = GaugeMetricFamily(
            "plexrl_condition_seconds",
            "How long a condition that delays work has lasted; absent while there is none.",
            labels=["code"],
        )
        longest: dict[str, float] = {}
        for each in health["conditions"]:
            code = each["code"]
            longest[code] = max(longest.get(code, 0.0), self._now - each["since"])
        for code, seconds in sorted(longest.items()):
            holds.add_metric([code], seconds)
        yield holds
        restarts = CounterMetricFamily("plexrl_part_restarts", "Restarts of parts of the cluster.")
        restarts.add_metric([], health["restarts"])
        yield restarts


def metrics_text(*collectors: Collector) -> bytes:
    """The metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    for each in collectors:
        registry.register(each)
    return generate_latest(registry)
