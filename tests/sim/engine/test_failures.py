"""Failures are independent of the policy, and every job survives them."""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.sim.engine.faults.failures import node_failures, worker_failures
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.policies import SIM_POLICIES
from plexrl.sim.workload.scenario import Failures, NodeType, Pool, Scenario
from plexrl.traces import MODEL_CLASSES, TraceJob

NODES = [f"n{index}" for index in range(50)]


@dataclass(frozen=True, slots=True)
class Jobs:
    """A source of jobs in memory."""

    rows: tuple[TraceJob, ...]

    def jobs(self) -> Iterator[TraceJob]:
        return iter(self.rows)


def scenario(failures: Failures, *, jobs: int = 10, **changes: object) -> Scenario:
    demand = MODEL_CLASSES["7B"].demand()
    rows = tuple(
        TraceJob(job_id=f"job{index}", submit_s=500.0 * index, gpus=8, cycles=30, **demand)
        for index in range(jobs)
    )
    plain = Scenario(source=Jobs(rows), pools=(Pool(nodes=4),), failures=failures)
    return replace(plain, **changes)  # type: ignore[arg-type]


def plain(result: SimResult) -> SimResult:
    speed = replace(result.speed, wall_s=0.0, events_per_s=0.0, peak_bytes=0)
    return replace(result, speed=speed)


def test_a_node_fails_at_its_rate_and_never_while_it_is_away() -> None:
    failures = Failures(node_mtbf_s=1000.0, repair_s=100.0, state_survives=0.25)
    found = list(itertools.islice(node_failures(failures, 1, NODES), 20_000))
    assert found == sorted(found, key=lambda each: each.lost_at)
    by_node: dict[str, list[float]] = {}
    for each in found:
        assert each.back_at == each.lost_at + 100.0
        by_node.setdefault(each.node, []).append(each.lost_at)
    assert set(by_node) == set(NODES)
    gaps = [b - a - 100.0 for times in by_node.values() for a, b in itertools.pairwise(times)]
    assert min(gaps) > 0.0
    assert statistics.mean(gaps) == pytest.approx(1000.0, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1000.0, rel=0.05)
    survived = sum(each.survives for each in found) / len(found)
    assert survived == pytest.approx(0.25, abs=0.02)


def test_failures_follow_from_the_seed_and_the_name() -> None:
    failures = Failures(node_mtbf_s=1000.0, worker_mtbf_s=50.0)
    few = list(itertools.islice(node_failures(failures, 1, NODES[:1]), 20))
    many = itertools.islice(node_failures(failures, 1, NODES), 2000)
    assert [each for each in many if each.node == NODES[0]][:20] == few
    times = list(itertools.islice(worker_failures(failures, 1, "a"), 20_000))
    assert times == list(itertools.islice(worker_failures(failures, 1, "a"), 20_000))
    assert times[-1] / 20_000 == pytest.approx(50.0, rel=0.03)
    assert not set(times) & set(itertools.islice(worker_failures(failures, 1, "b"), 20_000))


def test_what_never_fails_has_no_failures() -> None:
    assert list(node_failures(Failures(), 1, NODES)) == []
    assert list(worker_failures(Failures(), 1, "a")) == []


@pytest.mark.parametrize("policy", sorted(SIM_POLICIES))
def test_every_cycle_counts_once_though_nodes_and_workers_fail(policy: str) -> None:
    failures = Failures(node_mtbf_s=20_000.0, repair_s=900.0, worker_mtbf_s=12_000.0)
    result = simulate(scenario(failures, policy=policy, check=True))
    assert (result.jobs, result.failed_jobs, result.cycles) == (10, 0, 300)
    assert result.failures >= 5


def test_what_is_carried_out_again_makes_the_group_busy_again() -> None:
    failures = Failures(worker_mtbf_s=3000.0)
    broken = simulate(scenario(failures, jobs=2, policy="isolated"))
    whole = simulate(scenario(Failures(), jobs=2, policy="isolated"))
    assert (broken.jobs, broken.failed_jobs, broken.cycles) == (2, 0, 60)
    assert broken.busy_gpu_hours > whole.busy_gpu_hours
    assert broken.completion.mean > whole.completion.mean
    assert whole.failures == 0 < broken.failures


def test_policies_meet_the_same_node_failures() -> None:
    failures = Failures(node_mtbf_s=30_000.0, repair_s=600.0)
    results = [simulate(scenario(failures, policy=policy)) for policy in ("pack", "spread")]
    expected = list(itertools.islice(node_failures(failures, 0, [f"p0n{n}" for n in range(4)]), 99))
    for result in results:
        assert result.failures == sum(each.lost_at <= result.drain_s for each in expected)
    assert min(result.failures for result in results) > 0


def test_a_run_with_failures_repeats_itself() -> None:
    failures = Failures(node_mtbf_s=20_000.0, worker_mtbf_s=10_000.0)
    run = scenario(failures, policy="spread+backfill")
    assert plain(simulate(run)) == plain(simulate(run))
    assert plain(simulate(replace(run, seed=1))) != plain(simulate(run))


def test_a_job_whose_state_is_lost_with_its_node_fails() -> None:
    gone = Failures(node_mtbf_s=5000.0, repair_s=300.0, state_survives=0.0)
    result = simulate(scenario(gone, policy="pack"))
    assert result.jobs == 10
    assert 0 < result.failed_jobs < 10
    assert result.cycles < 300


def test_states_that_spill_make_a_run_longer_and_lose_nothing() -> None:
    roomy = scenario(Failures(), policy="pack", switch_s=None)
    tight = NodeType(host_memory_bytes=160 * 10**9, nvme_bytes_per_s=2e9)
    spilling = replace(roomy, pools=(Pool(nodes=4, node_type=tight),), check=True)
    one, other = simulate(roomy), simulate(spilling)
    assert one.cycles == other.cycles == 300
    assert other.switch_gpu_hours > 2.0 * one.switch_gpu_hours


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 0 s"):
        Failures(node_mtbf_s=-1.0)
    with pytest.raises(InvalidRequestError, match="0 to 1"):
        Failures(state_survives=1.5)
