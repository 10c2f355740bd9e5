"""Prometheus metrics: the cluster's health, as in `/v1/health`, how waits were estimated, and what
jobs waited beside what they accept."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from plexrl.router.job_files.record_store import JobKey
from plexrl.wire.messages.cluster_views import HealthView
from plexrl.wire.messages.run_views import RunHealthView


class HealthCollector(Collector):
    """Metrics of one health check."""

    def __init__(self, health: HealthView, now: float) -> None:
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
        for condition in health["conditions"]:
            code = condition["code"]
            longest[code] = max(longest.get(code, 0.0), self._now - condition["since"])
        for code, seconds in sorted(longest.items()):
            holds.add_metric([code], seconds)
        yield holds
        restarts = CounterMetricFamily("plexrl_part_restarts", "Restarts of parts of the cluster.")
        restarts.add_metric([], health["restarts"])
        yield restarts


class WaitCollector(Collector):
    """Estimated beside actual waits for node groups, of the sample that the scheduler compares."""

    def __init__(self, quality: Mapping[str, Any]) -> None:
        """`quality` is the scheduler's `EtaQualityView`."""
        self._quality = quality

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        quality = self._quality
        yield HistogramMetricFamily(
            "plexrl_wait_ratio",
            "(Actual wait + 1 s) / (estimated wait + 1 s).",
            buckets=list(quality["ratios"].items()),
            sum_value=quality["ratio_sum"],
        )
        starts = CounterMetricFamily(
            "plexrl_wait_starts",
            "Starts of waiting operations: before, inside and after the estimated 80 % interval.",
            labels=["start"],
        )
        outside = quality["early"] + quality["late"]
        starts.add_metric(["early"], quality["early"])
        starts.add_metric(["inside"], quality["estimates"] - outside)
        starts.add_metric(["late"], quality["late"])
        yield starts
        yield CounterMetricFamily(
            "plexrl_wait_slips",
            "Waits more than twice as long as estimated, and at least 1 s longer.",
            value=quality["slipped"],
        )


class RefusedKeysCollector(Collector):
    """Requests without a valid API key that this router refused."""

    def __init__(self, count: int, limited_count: int) -> None:
        """`count` were answered 401, `limited_count` 429."""
        self._counts = {"401": count, "429": limited_count}

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        refused = CounterMetricFamily(
            "plexrl_refused_keys",
            "Requests without a valid API key that this router refused, by status.",
            labels=["status"],
        )
        for status, count in self._counts.items():
            refused.add_metric([status], count)
        yield refused


class ServiceLevelCollector(Collector):
    """The part of their time that live jobs wait for others, beside the part that they accept."""

    def __init__(
        self, jobs: Sequence[Mapping[str, Any]], named: Sequence[Mapping[str, Any]]
    ) -> None:
        """`jobs` are the scheduler's `ServiceLevelView`s; `named` those that have own figures."""
        self._jobs = [job for job in jobs if job["waiting_part"] is not None]
        self._named = named

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        over = sum(job["waiting_part"] > job["slo"] for job in self._jobs)
        yield GaugeMetricFamily(
            "plexrl_slo_jobs", "Live jobs whose waiting is measured.", value=len(self._jobs)
        )
        yield GaugeMetricFamily(
            "plexrl_slo_jobs_over",
            "Those of them that waited a greater part of their time than they accept.",
            value=over,
        )
        bounds = GaugeMetricFamily(
            "plexrl_job_slo",
            "The greatest waiting / (waiting + running) that a job accepts.",
            labels=["job", "tenant", "name"],
        )
        parts = GaugeMetricFamily(
            "plexrl_job_waiting_part",
            "Measured waiting / (waiting + running) of a job, of its last cycles.",
            labels=["job", "tenant", "name"],
        )
        for each in self._named:
            labels = [each["job"], each["tenant"], each["name"]]
            bounds.add_metric(labels, each["slo"])
            if each["waiting_part"] is not None:
                parts.add_metric(labels, each["waiting_part"])
        yield bounds
        yield parts


class RunHealthCollector(Collector):
    """Warnings of live jobs' runs, as this router sees them."""

    def __init__(
        self,
        views: Mapping[JobKey, RunHealthView],
        jobs: Sequence[Mapping[str, Any]],
        named: Sequence[Mapping[str, Any]],
    ) -> None:
        """`views` are by job; `jobs` and `named` as in `ServiceLevelCollector`."""
        self._views = [view for job in jobs if (view := views.get(_key(job)))]
        self._named = [(job, view) for job in named if (view := views.get(_key(job)))]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        counts = Counter(warning["code"] for view in self._views for warning in view["warnings"])
        sick = GaugeMetricFamily(
            "plexrl_run_warnings", "Live jobs with a warning of their run.", labels=["code"]
        )
        for code, count in sorted(counts.items()):
            sick.add_metric([code], count)
        yield sick
        figures = GaugeMetricFamily(
            "plexrl_job_run_figure",
            "Figure of a job's run that a warning is about, over its last calls.",
            labels=["job", "tenant", "name", "figure"],
        )
        kl = GaugeMetricFamily(
            "plexrl_job_sampler_trainer_kl",
            "KL in nats a token, by steps by which the sampler's weights are older.",
            labels=["job", "tenant", "name", "steps_older"],
        )
        for each, view in self._named:
            labels = [each["job"], each["tenant"], each["name"]]
            for name, value in view["figures"].items():
                figures.add_metric([*labels, name], value)
            for behind, value in view["kl"].items():
                kl.add_metric([*labels, behind], value)
        yield figures
        yield kl


def metrics_text(*collectors: Collector) -> bytes:
    """The metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def _key(job: Mapping[str, Any]) -> JobKey:
    return JobKey(job["tenant"], job["job"])
