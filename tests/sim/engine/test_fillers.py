"""Preemptible generation in the idle time of simulated groups."""

from dataclasses import replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.workload.policies import SIM_POLICIES
from plexrl.sim.workload.scenario import Failures, Scenario
from tests.sim.engine.test_simulate import rows, scenario


def filled(count: int, *, nodes: int, policy: str = "isolated") -> Scenario:
    plain = scenario(rows(count), nodes=nodes, policy=policy)
    return replace(plain, fills_valleys=True, check=True, switch_s=8.0)


@pytest.mark.parametrize("policy", sorted(SIM_POLICIES))
def test_every_policy_drains_the_others_jobs_and_fills_idle_time(policy: str) -> None:
    result = simulate(filled(5, nodes=3, policy=policy))
    assert (result.jobs, result.failed_jobs, result.cycles) == (5, 0, 40)
    assert result.filled_gpu_hours > 0.0


def test_jobs_with_regular_cycles_are_not_slowed_down_and_most_of_their_pauses_is_used() -> None:
    jobs = filled(1, nodes=1)
    beside, alone = simulate(jobs), simulate(replace(jobs, fills_valleys=False))
    idle = alone.training_gpu_hours - alone.busy_gpu_hours - alone.switch_gpu_hours
    assert beside.filled_gpu_hours > 0.7 * idle
    assert alone.filled_gpu_hours == 0.0
    # Only the first pauses are of unknown length.
    assert beside.cycle_slowdown.median == pytest.approx(0.0, abs=1e-9)
    assert beside.drain_s <= alone.drain_s + 3 * 8.2


def test_an_equal_scenario_gives_an_equal_result() -> None:
    first, second = (simulate(filled(4, nodes=2, policy="pack")) for _ in range(2))
    assert replace(first, speed=second.speed) == second


def test_lost_nodes_and_workers_lose_no_job() -> None:
    failures = Failures(node_mtbf_s=20_000.0, repair_s=600.0, worker_mtbf_s=5_000.0)
    jobs = filled(6, nodes=3, policy="spread+backfill")
    result = simulate(replace(jobs, failures=failures))
    assert (result.jobs, result.failed_jobs) == (6, 0)
    assert result.failures > 0


def test_a_policy_without_groups_refuses_to_fill_them() -> None:
    with pytest.raises(InvalidRequestError, match="idle time to fill"):
        simulate(filled(1, nodes=1, policy="easy"))
