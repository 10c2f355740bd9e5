"""A collector's result matches its inputs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from plexrl.sim.metrics.collector import SPANS_MAX, Collector
from plexrl.sim.results.result import SERIES_BINS, SimResult, Speed
from plexrl.sim.workload.scenario import NodeType, Pool, Scenario
from plexrl.traces import TraceJob

SPEED = Speed(wall_s=1.0, events_per_s=1.0, peak_bytes=1)
HOUR_S = 3600.0


class NoJobs:
    def jobs(self) -> Iterator[TraceJob]:
        return iter(())


def scenario(**changes: object) -> Scenario:
    plain = Scenario(source=NoJobs(), pools=(Pool(nodes=2, node_type=NodeType(price=2.0)),))
    return replace(plain, **changes)  # type: ignore[arg-type]


def job(name: str, *, tenant: str = "ann", rollout_gpus: int = 0) -> TraceJob:
    return TraceJob(
        job_id=name, submit_s=0.0, gpus=8, tenant=tenant, rollout_gpus=rollout_gpus, duration_s=1.0
    )


def finish(collector: Collector, now: float) -> SimResult:
    return collector.result(now, events=10, switches=2, speed=SPEED)


def test_the_peak_of_rollout_gpus_is_of_jobs_that_run_at_one_time() -> None:
    collector = Collector(scenario())
    for name, gpus in (("a", 4), ("b", 2), ("c", 3)):
        collector.job_submitted(job(name, rollout_gpus=gpus), 0.0)
    collector.job_placed("a", 0.0)
    collector.job_placed("b", 10.0)
    collector.job_placed("b", 20.0)
    collector.job_ended("a", 100.0, "completed", 100.0)
    collector.job_placed("c", 100.0)
    collector.job_ended("b", 200.0, "failed", 0.0)
    collector.job_ended("c", 200.0, "completed", 100.0)
    assert finish(collector, 200.0).rollout_gpus_peak == 6


def test_the_measures_of_two_jobs_that_share_a_group() -> None:
    collector = Collector(scenario())
    collector.job_submitted(job("a", rollout_gpus=4), 0.0)
    collector.group_made("g", 8, 0.0)
    collector.job_placed("a", 0.0)
    collector.job_submitted(job("b", tenant="bob"), 100.0)
    collector.job_placed("b", 200.0)
    collector.ran("g", "a", 8, "load", 0.0, 10.0)
    collector.ran("g", "a", 8, "run", 10.0, 110.0)
    collector.cycle_ended("a", 110.0, 100.0, 10.0)
    collector.ran("g", "a", 8, "offload", 110.0, 130.0)
    collector.ran("g", "b", 8, "load", 130.0, 150.0)
    collector.job_ended("a", 400.0, "completed", 200.0)
    collector.ran("g", "b", 8, "run", 150.0, 350.0)
    collector.cycle_ended("b", 150.0, 150.0, 0.0)
    collector.job_ended("b", 500.0, "completed", 100.0)
    collector.group_gone("g", 8, 500.0)
    found = finish(collector, 500.0)
    assert (found.jobs, found.failed_jobs, found.cycles) == (2, 0, 2)
    assert found.drain_s == 500.0
    # Offload of a and load of b are both b's.
    held = {tenant.tenant: tenant.gpu_hours * HOUR_S / 8 for tenant in found.tenants}
    assert held == pytest.approx({"ann": 110.0, "bob": 240.0})
    assert found.busy_gpu_hours == pytest.approx(8 * 300 / HOUR_S)
    assert found.switch_gpu_hours == pytest.approx(8 * 50 / HOUR_S)
    assert found.training_gpu_hours == pytest.approx(8 * 500 / HOUR_S)
    assert found.rollout_gpu_hours == pytest.approx(4 * 400 / HOUR_S)
    assert found.gpu_hours_per_cycle == pytest.approx((4000 + 1600) / 2 / HOUR_S)
    assert found.cost == pytest.approx(2.0 * (16 * 500 + 1600) / HOUR_S)
    assert (found.wait.count, found.wait.mean, found.wait.highest) == (2, 50.0, 100.0)
    assert found.normalized_wait.highest == pytest.approx(1.0)
    assert found.job_slowdown.mean == pytest.approx((1.0 + 2.0) / 2)
    assert found.completion.mean == pytest.approx((2.0 + 4.0) / 2)
    assert found.cycle_slowdown.highest == pytest.approx(0.1)
    assert found.worst_tenant == pytest.approx(4.0)
    # Work: a 800, b 1600 GPU-seconds on 16 GPUs.
    assert found.bounds.critical_path_s == 200.0
    assert found.bounds.area_s == pytest.approx(100.0 + 1600 / 16)
    parts = [(grouped, trains) for _, grouped, trains in found.utilisation]
    # 500 s do not fit into that many bins of one second.
    assert len(parts) == 250
    assert {grouped for grouped, _ in parts} == {0.5}
    assert sum(trains for _, trains in parts) * 2.0 == pytest.approx(300 * 0.5)


def test_a_job_that_the_core_gave_up_is_counted_and_not_measured() -> None:
    collector = Collector(scenario())
    collector.job_submitted(job("a"), 0.0)
    collector.job_ended("a", 50.0, "failed", 0.0)
    found = finish(collector, 50.0)
    assert (found.jobs, found.failed_jobs, found.wait.count) == (1, 1, 0)
    assert found.bounds.bound_s == 0.0
    assert found.tenants[0].jobs == 1


def test_where_nodes_differ_the_bounds_are_of_the_fastest() -> None:
    pools = (
        Pool(nodes=1, node_type=NodeType(name="slow", speed=1.0)),
        Pool(nodes=1, node_type=NodeType(name="fast", speed=2.0)),
    )
    collector = Collector(scenario(pools=pools))
    for name, node_type in (("a", ""), ("b", "slow")):
        collector.job_submitted(replace(job(name), node_type=node_type), 0.0)
        collector.job_placed(name, 0.0)
        collector.ran("g", name, 8, "run", 0.0, 100.0)
        collector.job_ended(name, 100.0, "completed", 60.0 if name == "b" else 100.0)
    bounds = finish(collector, 100.0).bounds
    # a could have done with half of everything, on the other type; b could not.
    assert bounds.critical_path_s == 60.0
    assert bounds.area_s == pytest.approx(max(100.0, (400.0 + 800.0) / 16))


def test_only_the_first_placement_ends_the_wait() -> None:
    collector = Collector(scenario())
    collector.job_submitted(job("a"), 0.0)
    collector.job_placed("a", 30.0)
    collector.job_placed("a", 90.0)
    collector.job_ended("a", 130.0, "completed", 100.0)
    found = finish(collector, 130.0)
    assert found.wait.highest == 30.0
    assert found.job_slowdown.highest == pytest.approx(0.0, abs=1e-9)


def test_an_offload_that_no_load_follows_is_the_jobs_own() -> None:
    collector = Collector(scenario())
    collector.group_made("g", 8, 0.0)
    collector.job_submitted(job("a"), 0.0)
    collector.job_placed("a", 0.0)
    collector.ran("g", "a", 8, "offload", 0.0, 10.0)
    collector.ran("g", "a", 8, "offload", 20.0, 30.0)
    found = finish(collector, 100.0)
    assert found.tenants[0].gpu_hours == pytest.approx(160.0 / HOUR_S)


def test_spans_are_those_that_touch_the_window_and_bounded() -> None:
    collector = Collector(scenario(window_s=(100.0, 1e9)))
    collector.ran("g", "a", 8, "run", 0.0, 100.0)
    collector.ran("g", "a", 8, "run", 90.0, 101.0)
    for number in range(SPANS_MAX + 4):
        collector.ran("g", "a", 8, "run", 200.0 + number, 201.0 + number)
    found = finish(collector, 1e5)
    assert len(found.spans) == SPANS_MAX
    assert (found.spans[0].start_s, found.spans_left_out) == (90.0, 5)
    assert not finish(Collector(scenario()), 1.0).spans


def test_what_is_kept_does_not_grow_with_the_jobs() -> None:
    collector = Collector(scenario())
    now = 0.0
    for number in range(3000):
        name = f"j{number}"
        collector.job_submitted(job(name, tenant=f"t{number % 5}"), now)
        collector.job_placed(name, now + 1.0)
        collector.group_made(f"g{number}", 8, now)
        collector.ran(f"g{number}", name, 8, "run", now + 1.0, now + 9.0)
        collector.cycle_ended(name, 9.0, 8.0, 1.0)
        collector.job_ended(name, now + 9.0, "completed", 8.0)
        collector.group_gone(f"g{number}", 8, now + 9.0)
        now += 10.0
    assert not collector._jobs
    assert not collector._groups
    assert not collector._unbilled
    found = finish(collector, now)
    assert found.jobs == 3000
    assert len(found.utilisation) <= SERIES_BINS


def test_a_snapshot_is_the_jobs_own_and_not_the_next_ones() -> None:
    collector = Collector(scenario())
    for name, tenant in (("a", "ann"), ("b", "bob")):
        collector.job_submitted(job(name, tenant=tenant), 0.0)
    collector.ran("g", "a", 8, "offload", 0.0, 10.0)
    collector.ran("g", "a", 8, "run", 10.0, 20.0)
    collector.ran("g", "a", 8, "offload", 20.0, 21.0)
    collector.ran("g", "b", 8, "load", 21.0, 22.0)
    found = finish(collector, 100.0)
    held = {each.tenant: each.gpu_hours * HOUR_S / 8 for each in found.tenants}
    assert held == pytest.approx({"ann": 20.0, "bob": 2.0})


def test_jobs_that_waited_more_than_they_accept_are_counted() -> None:
    """Of cycles of 100 s alone: the job's own bound, the default of 0.3, and one for all jobs."""
    counts = {}
    for for_all in (None, 0.5):
        collector = Collector(scenario(slo=for_all))
        for name, slo, took_s in (("a", 0.1, 120.0), ("b", 0.2, 120.0), ("c", None, 160.0)):
            collector.job_submitted(replace(job(name), slo=slo), 0.0)
            collector.job_placed(name, 0.0)
            collector.cycle_ended(name, took_s, 100.0, took_s - 100.0)
            collector.cycle_ended(name, took_s, 100.0, took_s - 100.0)
            collector.job_ended(name, 2 * took_s, "completed", 200.0)
        counts[for_all] = finish(collector, 1000.0).jobs_over_slo
    assert counts == {None: 2, 0.5: 0}
