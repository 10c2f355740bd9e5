"""Rollouts on GPUs of the cluster: bounded, held by their jobs, and as long as those outside."""

from dataclasses import replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.results.headline import whole_gpu_hours
from plexrl.sim.workload.policies import SIM_POLICIES
from plexrl.sim.workload.scenario import Failures, RolloutGpus, Scenario
from tests.sim.engine.test_simulate import rows, scenario

HOUR_S = 3600.0


def placed(
    count: int, *, nodes: int, rollout_gpus: int = 8, policy: str = "pack", staleness: int = 0
) -> Scenario:
    jobs = tuple(
        replace(job, rollout_gpus=rollout_gpus) for job in rows(count, staleness=staleness)
    )
    plain = scenario(jobs, nodes=nodes, policy=policy)
    return replace(plain, rollouts="own", check=True)


@pytest.mark.parametrize("policy", sorted(SIM_POLICIES))
def test_every_policy_drains_with_placed_rollouts(policy: str) -> None:
    result = simulate(placed(5, nodes=3, policy=policy))
    assert (result.jobs, result.failed_jobs, result.cycles) == (5, 0, 40)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_job_alone_takes_as_long_as_it_is_expected_to(staleness: int) -> None:
    result = simulate(replace(placed(1, nodes=2, staleness=staleness), switch_s=0.0))
    assert result.job_slowdown.highest == pytest.approx(0.0, abs=1e-9)
    assert result.cycle_slowdown.highest == pytest.approx(0.0, abs=1e-9)


def test_jobs_share_training_gpus_only_while_there_are_gpus_for_their_rollouts() -> None:
    """Training of all three fits on one node."""
    wide = simulate(placed(3, nodes=4))
    narrow = simulate(placed(3, nodes=2))
    assert wide.wait.highest == pytest.approx(0.0)
    assert narrow.wait.highest > 1000.0
    assert narrow.drain_s > 1.5 * wide.drain_s


def test_jobs_without_rollout_gpus_run_as_before() -> None:
    jobs = placed(4, nodes=2, rollout_gpus=0)
    outside = simulate(replace(jobs, rollouts="outside"))
    inside = simulate(jobs)
    assert (inside.drain_s, inside.events) == (outside.drain_s, outside.events)


def test_gpu_hours_of_rollouts_are_those_of_their_groups() -> None:
    jobs = placed(1, nodes=2)
    inside, outside = simulate(jobs), simulate(replace(jobs, rollouts="outside"))
    assert inside.rollout_gpu_hours == pytest.approx(8 * inside.drain_s / HOUR_S)
    assert inside.training_gpu_hours == pytest.approx(8 * inside.drain_s / HOUR_S)
    assert whole_gpu_hours(inside) == pytest.approx(16 * inside.drain_s / HOUR_S)
    assert whole_gpu_hours(outside) == pytest.approx(24 * outside.drain_s / HOUR_S, rel=0.01)


def test_the_bound_counts_the_work_of_rollouts() -> None:
    """Five jobs that hold 16 GPUs each and work all the time cannot end sooner on 16 GPUs."""
    result = simulate(placed(5, nodes=2))
    assert result.bounds.bound_s <= result.drain_s
    busy_s = result.busy_gpu_hours * HOUR_S / result.gpus
    assert result.bounds.area_s == pytest.approx(busy_s, rel=0.2)


@pytest.mark.parametrize("policy", ["pack", "spread+backfill", "rollmux"])
def test_a_rollout_shares_the_gpus_of_its_own_training(policy: str) -> None:
    """Both work in turns: two nodes run two jobs without waiting, which need four otherwise."""
    jobs = replace(placed(2, nodes=2, policy=policy), rollouts="shared", switch_s=1.0)
    own = simulate(replace(jobs, rollouts="own"))
    shared = simulate(jobs)
    assert (shared.jobs, shared.failed_jobs, shared.cycles) == (2, 0, 16)
    assert own.wait.highest > 1000.0
    assert shared.wait.highest == pytest.approx(0.0)
    assert shared.switches >= 2 * shared.cycles - 4
    assert shared.cycle_slowdown.highest < 0.05
    assert shared.drain_s < 0.6 * own.drain_s


def test_rollouts_that_run_ahead_of_training_keep_apart_from_it() -> None:
    jobs = placed(1, nodes=2, policy="spread+backfill", staleness=1)
    shared = simulate(replace(jobs, rollouts="shared"))
    assert shared.switches == 0
    assert shared.drain_s == pytest.approx(simulate(jobs).drain_s)


@pytest.mark.parametrize("rollout_gpus", [4, 8])
def test_a_lone_job_pays_for_no_switches_if_the_scheduler_decides(rollout_gpus: int) -> None:
    jobs = placed(1, nodes=2, rollout_gpus=rollout_gpus, policy="spread+backfill")
    automatic = simulate(replace(jobs, rollouts="automatic"))
    assert automatic.switches == 0
    assert automatic.drain_s == simulate(jobs).drain_s


@pytest.mark.parametrize("staleness", [0, 1])
def test_jobs_share_the_gpus_of_rollouts_while_others_wait_if_these_work_in_turns(
    staleness: int,
) -> None:
    jobs = placed(4, nodes=2, policy="spread+backfill", staleness=staleness)
    own, automatic = simulate(jobs), simulate(replace(jobs, rollouts="automatic"))
    assert (automatic.jobs, automatic.failed_jobs) == (4, 0)
    if staleness:
        assert automatic.drain_s == pytest.approx(own.drain_s)
    else:
        assert automatic.drain_s < 0.8 * own.drain_s


@pytest.mark.parametrize("rollouts", ["shared", "automatic"])
def test_shared_rollouts_survive_the_loss_of_nodes(rollouts: RolloutGpus) -> None:
    jobs = replace(placed(3, nodes=3, policy="spread+backfill"), rollouts=rollouts)
    failures = Failures(node_mtbf_s=3_000.0, repair_s=600.0, worker_mtbf_s=3_000.0)
    result = simulate(replace(jobs, failures=failures))
    assert result.failures > 0
    assert (result.jobs, result.failed_jobs, result.cycles) == (3, 0, 24)


def test_a_training_on_its_rollouts_gpus_needs_no_more_gpus_than_it_has() -> None:
    """Each job trains on 8 GPUs, of which 4 are those of its rollouts."""
    jobs = replace(placed(2, nodes=2, rollout_gpus=4, policy="spread+backfill"), switch_s=1.0)
    shared = simulate(replace(jobs, rollouts="shared"))
    assert shared.gpus == 16
    assert shared.wait.highest == pytest.approx(0.0)
    own = simulate(replace(jobs, rollouts="own", pools=placed(2, nodes=4).pools))
    assert shared.busy_gpu_hours == pytest.approx(own.busy_gpu_hours)
    # Each cycle has a switch to the training and one back.
    assert shared.drain_s >= own.drain_s + 2 * 7 * 0.99


def test_rules_that_share_nothing_know_no_shared_rollouts() -> None:
    jobs = replace(placed(1, nodes=2), rollouts="shared", policy="easy", check=False)
    with pytest.raises(InvalidRequestError, match="shared GPUs of rollouts"):
        simulate(jobs)


def test_a_job_whose_rollouts_fit_nowhere_fails_and_the_others_go_on() -> None:
    jobs = placed(2, nodes=2)
    large = replace(rows(1)[0], job_id="large", rollout_gpus=16)
    source = type(jobs.source)((large, *jobs.source.jobs()))  # type: ignore[call-arg]
    result = simulate(replace(jobs, source=source, check=False))
    assert (result.jobs, result.failed_jobs) == (3, 1)


def test_rollouts_that_lose_their_node_are_repeated() -> None:
    jobs = placed(3, nodes=6)
    failures = Failures(node_mtbf_s=3_000.0, repair_s=600.0)
    result = simulate(replace(jobs, failures=failures))
    assert result.failures > 0
    assert (result.jobs, result.failed_jobs, result.cycles) == (3, 0, 24)
