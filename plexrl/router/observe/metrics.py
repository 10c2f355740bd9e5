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
from plexrl.wire.messages.overview_views import GPU_STATES, OverviewView
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


class OverviewCollector(Collector):
    """Use of the GPUs, what waits, context switches, operations, and the journal: without names of
    tenants or jobs."""

    def __init__(self, view: OverviewView) -> None:
        """`view`: an operator's."""
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        view = self._view
        gpus = GaugeMetricFamily(
            "plexrl_gpus", "GPUs by what happens on them.", labels=["node_type", "state"]
        )
        for counts in view["node_types"]:
            for state in GPU_STATES:
                gpus.add_metric([counts["node_type"], state], counts["states"].get(state, 0))
        yield gpus
        yield GaugeMetricFamily("plexrl_jobs_live", "Live jobs.", value=view["jobs_live"])
        yield from self._waiting()
        yield CounterMetricFamily(
            "plexrl_switches", "Context switches.", value=view.get("switches", 0)
        )
        yield GaugeMetricFamily(
            "plexrl_group_switch_seconds",
            "What the context switches of the present groups took.",
            value=view.get("switch_seconds", 0.0),
        )
        yield from self._operations()
        yield from self._journal()

    def _waiting(self) -> Iterator[Metric]:
        view = self._view
        lengths = GaugeMetricFamily(
            "plexrl_waiting", "Deployments that wait, by what for.", labels=["what"]
        )
        for what, count in (
            ("gpus", view["waiting"]),
            ("turn", view["turns"]),
            ("impossible", view["impossible"]),
        ):
            lengths.add_metric([what], count)
        yield lengths
        ages = GaugeMetricFamily(
            "plexrl_waiting_seconds_max",
            "The longest present wait; absent while nothing waits.",
            labels=["what"],
        )
        for what, since in (("gpus", view["waiting_since"]), ("turn", view["turns_since"])):
            if since is not None:
                ages.add_metric([what], max(0.0, view["now"] - since))
        yield ages

    def _operations(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "plexrl_operations", "Operations that ended.", labels=["kind", "state"]
        )
        seconds = CounterMetricFamily(
            "plexrl_operation_seconds",
            "Seconds of operations that ended: in queues, waiting for switches, running.",
            labels=["kind", "state", "phase"],
        )
        tokens = CounterMetricFamily(
            "plexrl_operation_tokens", "Tokens of operations that ended.", labels=["kind"]
        )
        sums: Counter[str] = Counter()
        for each in self._view.get("operations", []):
            labels = [each["kind"], each["state"]]
            ended.add_metric(labels, each["operations"])
            seconds.add_metric([*labels, "queue"], each["queue_s"])
            seconds.add_metric([*labels, "switch"], each["switch_s"])
            seconds.add_metric([*labels, "run"], each["run_s"])
            sums[each["kind"]] += each["tokens"]
        for kind, count in sorted(sums.items()):
            tokens.add_metric([kind], count)
        yield from (ended, seconds, tokens)

    def _journal(self) -> Iterator[Metric]:
        journal = self._view.get("journal")
        if journal is None:
            return
        yield CounterMetricFamily(
            "plexrl_journal_events", "Events in the journal.", value=journal["events"]
        )
        for name, text, value in (
            (
                "to_replay",
                "Events after the last snapshot, which a restart replays.",
                journal["events_to_replay"],
            ),
            ("waiting", "Events that wait to be written.", journal["waiting_events"]),
        ):
            yield GaugeMetricFamily(f"plexrl_journal_events_{name}", text, value=value)
        yield GaugeMetricFamily(
            "plexrl_journal_held", "1 while the journal takes no events.", value=journal["is_held"]
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
