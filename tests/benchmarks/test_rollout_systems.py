"""The systems that `staleflow` is compared with: conservation, bounds, closed forms, order."""

from dataclasses import replace

import pytest

from benchmarks.rollout_systems.rivals import BOUNDED, Rival, split
from plexrl.sim.rollout.results.bound import throughput_bound
from plexrl.sim.rollout.results.outcome import outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.setting import System, SystemName
from tests.sim.rollout.test_systems import EQUAL, SMALL, batch_s, lengths

RIVALS = [(Rival.ONE_STEP, split(1, 5)), *((rival, split(2, 5)) for rival in BOUNDED)]
ALL = pytest.mark.parametrize(("rival", "system"), RIVALS, ids=str)


@ALL
def test_every_trajectory_is_trained_once_and_none_is_left_behind(
    rival: Rival, system: System
) -> None:
    recorder = rival.simulate(SMALL, system)
    batches = [sum(step.staleness.values()) for step in recorder.steps]
    assert batches == [SMALL.batch_trajectories] * len(batches)
    assert len(recorder.trained_numbers) == sum(batches)
    generated = sum(step.response_tokens for step in recorder.steps)
    trained = lengths(SMALL, recorder.trained_numbers)
    assert generated == sum(length * count for length, count in trained.items())
    late = system.staleness + (rival == Rival.INFLIGHT_LOOSE)
    assert set(range((SMALL.steps - late) * SMALL.batch_trajectories)) <= recorder.trained_numbers


@ALL
def test_the_staleness_bound_is_kept_but_in_the_order_of_completion(
    rival: Rival, system: System
) -> None:
    recorder = rival.simulate(SMALL, system, with_history=True)
    largest = max(max(step.staleness) for step in recorder.steps)
    if rival == Rival.INFLIGHT_LOOSE:
        assert largest > system.staleness
    else:
        assert largest == system.staleness
    most = (system.staleness + 1) * SMALL.batch_trajectories
    for at in range(len(recorder.loads[0])):
        loads = [recorder.loads[number][at] for number in recorder.loads]
        assert sum(load.running + load.waiting for load in loads) <= most


@pytest.mark.parametrize("train", [1e-4, 1e-1])
def test_one_step_takes_the_longer_of_rollout_and_training(train: float) -> None:
    setting = replace(EQUAL, costs=replace(EQUAL.costs, train_gpu_s_per_token=train))
    rollout_s = batch_s(setting, 1) + setting.costs.pull_s
    train_s = setting.costs.train_s(8 * 1100, 1)
    step_s = Rival.ONE_STEP.outcome(setting, split(1, 1)).step_s
    assert step_s == pytest.approx(max(rollout_s, train_s))


def test_training_is_the_bound_if_rollout_is_quick() -> None:
    setting = replace(EQUAL, costs=replace(EQUAL.costs, train_gpu_s_per_token=1e-1))
    for rival in BOUNDED:
        step_s = rival.outcome(setting, split(2, 1)).step_s
        assert step_s == pytest.approx(setting.costs.train_s(8 * 1100, 1))


def test_more_asynchrony_trains_more_tokens() -> None:
    sync = System(name=SystemName.SYNC)
    slowest = outcome(SMALL, sync, simulate_rollout(SMALL, sync)).throughput
    one_step = Rival.ONE_STEP.outcome(SMALL, split(1, 5)).throughput
    assert slowest < one_step < Rival.INFLIGHT.outcome(SMALL, split(2, 5)).throughput


@pytest.mark.parametrize("rival", [Rival.ONE_STEP, Rival.INFLIGHT])
@pytest.mark.parametrize("train", [1e-4, 7e-4, 3e-3])
def test_no_schedule_exceeds_the_bound(rival: Rival, train: float) -> None:
    """Counted from the start, so that nothing is trained that was generated before."""
    costs = replace(SMALL.costs, train_gpu_s_per_token=train)
    setting = replace(SMALL, warmup_steps=0, costs=costs)
    for gpus in (3, 5):
        found = rival.outcome(setting, split(1, gpus))
        assert found.throughput <= throughput_bound(setting, gpus) <= throughput_bound(setting)


def test_busy_instances_or_a_busy_trainer_reach_the_bound() -> None:
    """Without costs of a step itself, the size of the batch does not matter."""
    costs = replace(EQUAL.costs, k2=1e-9, k4=0.0, pull_s=0.0, train_fixed_s=0.0)
    setting = replace(EQUAL, costs=replace(costs, train_gpu_s_per_token=1e-9))
    generated = Rival.ONE_STEP.outcome(setting, split(1, 1))
    assert generated.throughput == pytest.approx(throughput_bound(setting, 1), rel=1e-4)
    slow = replace(EQUAL, costs=replace(costs, train_gpu_s_per_token=1.0))
    trained = Rival.INFLIGHT.outcome(slow, split(2, 1))
    assert trained.throughput == pytest.approx(throughput_bound(slow, 1))
