"""Runs without sharing: the jobs' own cycles, and drains as an independent list scheduler has."""

import heapq
from collections.abc import Sequence
from dataclasses import replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.workload.policies import UNSHARED
from plexrl.sim.workload.scenario import Failures, Pool, Scenario
from plexrl.sim.workload.source.trace_source import PublishedSource
from plexrl.traces import Shape
from tests.sim.engine.test_placed_rollouts import placed
from tests.sim.engine.test_simulate import Jobs, rows

DAY_S = 86_400.0
GPUS = 2048


@pytest.mark.parametrize("policy", UNSHARED)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_job_takes_as_long_as_it_does_alone(policy: str, staleness: int) -> None:
    jobs = placed(1, nodes=2, staleness=staleness)
    alone, rigid = simulate(jobs), simulate(replace(jobs, policy=policy))
    assert rigid.drain_s == pytest.approx(alone.drain_s)
    assert rigid.cycles == alone.cycles
    assert rigid.training_gpu_hours == pytest.approx(alone.training_gpu_hours)
    assert rigid.rollout_gpu_hours == pytest.approx(alone.rollout_gpu_hours)
    assert rigid.bounds == alone.bounds
    assert rigid.cycle_slowdown.mean == pytest.approx(alone.cycle_slowdown.mean)


@pytest.mark.parametrize("policy", UNSHARED)
def test_a_job_that_fits_nowhere_fails_and_the_others_run(policy: str) -> None:
    jobs = placed(3, nodes=2, policy=policy)
    large = replace(rows(1)[0], job_id="large", gpus=64)
    result = simulate(replace(jobs, source=Jobs((large, *jobs.source.jobs()))))
    assert (result.jobs, result.failed_jobs, result.cycles) == (4, 1, 24)


def test_what_a_count_of_gpus_does_not_know_is_refused() -> None:
    jobs = placed(1, nodes=2, policy="easy")
    with pytest.raises(InvalidRequestError, match="knows no failures"):
        simulate(replace(jobs, failures=Failures(node_mtbf_s=1000.0)))
    with pytest.raises(InvalidRequestError, match="knows no several pools"):
        simulate(replace(jobs, pools=(Pool(nodes=1), Pool(nodes=1))))


def backlog() -> Scenario:
    """Two weeks of published jobs that all wait at the start, of up to half a day."""
    shape = Shape(backlog=True, cap_s=DAY_S / 2)
    source = PublishedSource(span_s=14 * DAY_S, jobs_per_day=12.0, shape=shape, seed=1)
    return Scenario(source=source, pools=(Pool(nodes=GPUS // 8),), policy="isolated+backfill")


def list_schedule(jobs: Sequence[tuple[int, float]]) -> float:
    """Drain of (GPUs, seconds) if at every moment the first that fit start."""
    waiting, free, now = list(jobs), GPUS, 0.0
    ends: list[tuple[float, int]] = []
    while waiting or ends:
        for job in list(waiting):
            if job[0] <= free:
                waiting.remove(job)
                free -= job[0]
                heapq.heappush(ends, (now + job[1], job[0]))
        now, gpus = heapq.heappop(ends)
        free += gpus
    return now


def test_isolated_jobs_that_backfill_drain_as_soon_as_a_list_scheduler_says() -> None:
    scenario = backlog()
    durations: dict[str, float] = {}
    simulate(
        replace(scenario, policy="easy"),
        on_job=lambda row: durations.update({row.job_id: row.run_s or 0.0}),
    )
    jobs = [(job.gpus, durations[job.job_id]) for job in scenario.source.jobs()]
    expected = list_schedule(jobs)
    backfilled = simulate(scenario).drain_s
    assert backfilled == pytest.approx(expected, rel=0.05)
    for policy in UNSHARED:
        assert simulate(replace(scenario, policy=policy)).drain_s > 0.95 * backfilled
