"""The daemon's Prometheus metrics, read from `Counters` and the daemon's parts on each scrape."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from plexrl.statemanager.daemon.handlers.caller import Services
from plexrl.statemanager.observe.counters import BYTES_BOUNDS, SECONDS_BOUNDS
from plexrl.statemanager.protocol.tickets import job_of
from plexrl.statemanager.store.tiers.eviction.policy import TierName

_MOVE = ("request", "outcome", "tier")


class DaemonCollector(Collector):
    """Collects all metrics of `/metrics`."""

    def __init__(self, services: Services, connections: Callable[[], int]) -> None:
        self._services = services
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        yield from self._tiers()
        yield from self._versions()
        yield from self._moves()
        moves = self._services.move_queue
        yield _gauge("moves_running", "Running moves.", len(moves.running()))
        yield _gauge("moves_waiting", "Queued moves.", moves.waiting())
        yield _gauge("connections", "Connected clients.", self._connections())
        yield from self._replicas()
        refused = CounterMetricFamily(
            "plexrl_statemanager_refused", "Refused requests, by error code.", labels=["code"]
        )
        for code, count in sorted(self._services.counters.refusals().items()):
            refused.add_metric([code], count)
        yield refused

    def _tiers(self) -> Iterator[Metric]:
        config, store = self._services.config, self._services.store
        used = _labelled("tier_bytes", "Used bytes of a tier.", "tier")
        bound = _labelled("tier_bytes_max", "Capacity of a tier.", "tier")
        for tier, limit in (
            (TierName.HOST, config.host_bytes),
            (TierName.NVME, config.nvme_bytes),
        ):
            used.add_metric([tier.value], store.used_bytes(tier))
            bound.add_metric([tier.value], limit)
        yield used
        yield bound
        _, resident = store.pool_bytes()
        yield _gauge("host_resident_bytes", "Host tier used or prefaulted.", resident)
        wanted = config.prefault_bytes
        yield _gauge("host_prefault_bytes", "Host tier to prefault at start.", wanted)
        arenas = _labelled("arena_bytes", "Device memory of workers' arenas.", "job")
        by_job: Counter[str] = Counter()
        for (deployment, _), nbytes in self._services.registry.resident_bytes().items():
            by_job[job_of(deployment)] += nbytes
        for job, nbytes in sorted(by_job.items()):
            arenas.add_metric([job], nbytes)
        yield arenas

    def _versions(self) -> Iterator[Metric]:
        labels = ("tenant", "job", "kind", "tier")
        count = _labelled("versions", "Stored versions.", *labels)
        size = _labelled("version_bytes", "Bytes of stored versions.", *labels)
        taken = _labelled(
            "tenant_bytes",
            "Bytes of a tenant in a tier, replicas counted once.",
            "tenant",
            "tier",
        )
        tenants = set[str]()
        counts: Counter[tuple[str, ...]] = Counter()
        sizes: Counter[tuple[str, ...]] = Counter()
        for version in self._services.store.find(lambda _: True):
            manifest = version.manifest
            job = job_of(manifest.deployment)
            key = (manifest.tenant, job, manifest.kind.value, version.tier.value)
            tenants.add(manifest.tenant)
            counts[key] += 1
            sizes[key] += manifest.nbytes
        for labelled in sorted(counts):
            count.add_metric(list(labelled), counts[labelled])
            size.add_metric(list(labelled), sizes[labelled])
        for tenant in sorted(tenants):
            for tier, nbytes in self._services.store.quotas.used_by(tenant).items():
                taken.add_metric([tenant, tier.value], nbytes)
        yield count
        yield size
        yield taken

    def _replicas(self) -> Iterator[Metric]:
        replicas = self._services.store.replicas
        sections = CounterMetricFamily(
            "plexrl_statemanager_replica_sections",
            "Declared replica sections, by whether the bytes were equal.",
            labels=["outcome"],
        )
        sections.add_metric(["shared"], replicas.shared)
        sections.add_metric(["different"], replicas.different)
        yield sections
        yield CounterMetricFamily(
            "plexrl_statemanager_replica_shared_bytes",
            "Bytes not stored again, because another rank's bytes are equal.",
            value=replicas.shared_bytes,
        )
        yield CounterMetricFamily(
            "plexrl_statemanager_replica_uncopied_bytes",
            "Bytes of these that stayed on their GPU, because digests were compared.",
            value=replicas.uncopied_bytes,
        )

    def _moves(self) -> Iterator[Metric]:
        seconds = HistogramMetricFamily(
            "plexrl_statemanager_move_seconds",
            "Duration of moves, without their time in the queue.",
            labels=_MOVE,
        )
        moved = HistogramMetricFamily(
            "plexrl_statemanager_move_bytes", "Bytes per move.", labels=_MOVE
        )
        found = sorted(
            self._services.counters.moves().items(),
            key=lambda item: (item[0].request, item[0].outcome, item[0].tier),
        )
        for kind, (in_seconds, in_bytes) in found:
            labels = [kind.request, kind.outcome, kind.tier]
            seconds.add_metric(labels, _buckets(SECONDS_BOUNDS, in_seconds[0]), in_seconds[1])
            moved.add_metric(labels, _buckets(BYTES_BOUNDS, in_bytes[0]), in_bytes[1])
        yield seconds
        yield moved
        yield CounterMetricFamily(
            "plexrl_statemanager_prefetched_bytes",
            "Bytes of loads that were copied to the device during the offload before.",
            value=self._services.counters.prefetched_bytes,
        )


def exposition(collector: DaemonCollector) -> bytes:
    """The metrics in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"plexrl_statemanager_{name}", text, value=value)


def _labelled(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"plexrl_statemanager_{name}", text, labels=labels)


def _buckets(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    names = [*(repr(bound) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))
