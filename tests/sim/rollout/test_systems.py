"""All systems on the virtual clock: conservation, bounds, closed forms, order."""

from collections import Counter
from dataclasses import replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.latency.costs import EngineCosts
from plexrl.sim.rollout.results.bound import throughput_bound
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.runs.split import best_splits, runner
from plexrl.sim.rollout.setting import Setting, Strategies, System, SystemName
from plexrl.sim.rollout.workload import Prompts, RolloutWorkload

SMALL = Setting(
    gpus=8,
    batch_groups=6,
    steps=9,
    warmup_steps=3,
    workload=RolloutWorkload(limit=20_000, group_size=4),
    costs=EngineCosts(kv_tokens=60_000),
    cycle_s=5.0,
)
VANILLA = Strategies(routing=False, synchronization=False, migration=False)
SYSTEMS = [
    System(name=SystemName.SYNC),
    System(name=SystemName.STALEFLOW, staleness=2, rollout_gpus=5),
    System(name=SystemName.STALEFLOW, staleness=2, rollout_gpus=5, strategies=VANILLA),
    System(name=SystemName.STALEFLOW, staleness=0, rollout_gpus=5),
]
ALL = pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.label)


def figures(setting: Setting, system: System) -> RolloutOutcome:
    return outcome(setting, system, simulate_rollout(setting, system))


def lengths(setting: Setting, numbers: set[int]) -> Counter[int]:
    """Response lengths of trajectories by their numbers."""
    size = setting.workload.group_size
    prompts = Prompts(setting.workload)
    members = [each for prompt in {at // size for at in numbers} for each in prompts.group(prompt)]
    return Counter(each.response_tokens for each in members if each.number in numbers)


@ALL
def test_every_trajectory_is_trained_once_with_all_of_its_tokens(system: System) -> None:
    recorder = simulate_rollout(SMALL, system)
    batches = [sum(step.staleness.values()) for step in recorder.steps]
    assert batches == [SMALL.batch_trajectories] * len(batches)
    assert len(recorder.trained_numbers) == sum(batches)
    generated = sum(step.response_tokens for step in recorder.steps)
    trained = lengths(SMALL, recorder.trained_numbers)
    assert generated == sum(length * count for length, count in trained.items())


@ALL
def test_no_prompt_is_left_behind(system: System) -> None:
    """Long responses are trained like short ones: a prompt may only be late by η batches."""
    recorder = simulate_rollout(SMALL, system)
    due = (SMALL.steps - system.staleness) * SMALL.batch_trajectories
    assert set(range(due)) <= recorder.trained_numbers


@ALL
def test_the_staleness_bound_is_kept(system: System) -> None:
    recorder = simulate_rollout(SMALL, system)
    assert max(max(step.staleness) for step in recorder.steps) == system.staleness


@ALL
def test_no_more_than_the_bound_is_in_flight(system: System) -> None:
    recorder = simulate_rollout(SMALL, system, with_history=True)
    most = (system.staleness + 1) * SMALL.batch_trajectories
    for at in range(len(recorder.loads[0])):
        loads = [recorder.loads[number][at] for number in recorder.loads]
        assert sum(load.running + load.waiting for load in loads) <= most


@ALL
def test_equal_seeds_give_equal_runs_and_other_seeds_others(system: System) -> None:
    first, again = (figures(SMALL, system) for _ in range(2))
    assert replace(first, decision_ms=None) == replace(again, decision_ms=None)
    other = replace(SMALL, workload=replace(SMALL.workload, seed=1))
    assert figures(other, system).throughput != first.throughput


@ALL
def test_a_history_changes_nothing(system: System) -> None:
    plain = figures(SMALL, system)
    recorder = simulate_rollout(SMALL, system, with_history=True)
    watched = outcome(SMALL, system, recorder)
    assert replace(plain, decision_ms=None) == replace(watched, decision_ms=None)
    assert len(recorder.loads) == recorder.instances
    last = SMALL.batch_trajectories * len([each for each in recorder.steps if each.version >= 5])
    assert len(recorder.lanes) == last


@pytest.mark.parametrize("strategies", [Strategies(), VANILLA], ids=lambda each: each.label)
def test_slow_commands_reach_an_instance_in_the_order_of_issue(strategies: Strategies) -> None:
    """A route that is issued after a pull must not overtake it: an instance with work cannot
    pull."""
    system = System(name=SystemName.STALEFLOW, staleness=2, rollout_gpus=5, strategies=strategies)
    recorder = simulate_rollout(replace(SMALL, command_s=4.0), system)
    assert max(max(step.staleness) for step in recorder.steps) == 2


EQUAL = Setting(
    gpus=2,
    batch_groups=4,
    steps=5,
    warmup_steps=2,
    workload=RolloutWorkload(limit=1000, group_size=2, prompt_tokens=100),
)
"""Every long response is cut at 1000 tokens, so all are equal."""


def batch_s(setting: Setting, instances: int) -> float:
    """Seconds of a batch of equal responses, one token at a time."""
    costs, workload = setting.costs, setting.workload
    many = setting.batch_trajectories // instances
    tokens = workload.prompt_tokens
    prefill_s = many * (costs.prefill_s_per_token * tokens + costs.prefill_s_per_token2 * tokens**2)
    return prefill_s + sum(
        costs.step_s(many, many * (workload.prompt_tokens + step)) for step in range(workload.limit)
    )


def test_synchronous_steps_take_rollout_training_and_update() -> None:
    found = figures(EQUAL, System(name=SystemName.SYNC))
    train_s = EQUAL.costs.train_s(8 * 1100, 2)
    assert found.step_s == pytest.approx(batch_s(EQUAL, 2) + train_s + EQUAL.costs.pull_s)


def test_training_is_the_bound_if_rollout_is_quick() -> None:
    setting = replace(EQUAL, costs=replace(EQUAL.costs, train_gpu_s_per_token=1e-1))
    found = figures(setting, System(name=SystemName.STALEFLOW, staleness=2, rollout_gpus=1))
    assert found.step_s == pytest.approx(setting.costs.train_s(8 * 1100, 1))


def test_more_asynchrony_trains_more_tokens() -> None:
    asked = [
        (SMALL, System(name=SystemName.SYNC)),
        (SMALL, System(name=SystemName.STALEFLOW, staleness=2)),
    ]
    with runner(1) as run:
        sync, staleflow = (outcome.throughput for outcome in best_splits(run.outcome, asked))
    assert sync < staleflow


def test_the_best_split_is_not_worse_than_its_neighbours() -> None:
    system = System(name=SystemName.STALEFLOW, staleness=2)
    with runner(1) as run:
        (best,) = best_splits(run.outcome, [(SMALL, system)])
    every = [figures(SMALL, replace(system, rollout_gpus=gpus)) for gpus in range(1, 8)]
    chosen = best.system.rollout_gpus
    near = [each for each in every if abs(each.system.rollout_gpus - chosen) == 1]
    assert all(each.throughput <= best.throughput for each in near)


@pytest.mark.slow
def test_processes_give_the_same_answer() -> None:
    asked = [(SMALL, System(name=SystemName.SYNC)), (SMALL, SYSTEMS[1])]
    with runner(1) as here, runner(2) as there:
        one, two = (best_splits(run.outcome, asked) for run in (here, there))
    assert [replace(outcome, decision_ms=None) for outcome in one] == [
        replace(outcome, decision_ms=None) for outcome in two
    ]


@pytest.mark.parametrize("gpus", [0, 8, 9])
def test_a_split_without_trainer_or_rollout_is_refused(gpus: int) -> None:
    with pytest.raises(InvalidRequestError, match="rollout"):
        simulate_rollout(SMALL, System(name=SystemName.STALEFLOW, staleness=1, rollout_gpus=gpus))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "gpus is 0"),
        ({"warmup_steps": 9}, "9 warm-up steps of 9"),
        ({"cycle_s": 0.0}, "cycle_s"),
        ({"costs": EngineCosts(kv_tokens=10_000)}, "does not fit a KV cache"),
        ({"costs": EngineCosts(gpus=16)}, "8 GPUs are fewer"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        replace(SMALL, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [1e-4, 7e-4, 3e-3])
def test_no_schedule_exceeds_the_bound(train: float) -> None:
    """Counted from the start, so that nothing is trained that was generated before."""
    costs = replace(SMALL.costs, train_gpu_s_per_token=train)
    setting = replace(SMALL, warmup_steps=0, costs=costs)
    for gpus in (3, 5):
        found = figures(setting, System(name=SystemName.STALEFLOW, staleness=1, rollout_gpus=gpus))
        assert found.throughput <= throughput_bound(setting, gpus) <= throughput_bound(setting)


def test_systems_with_a_fixed_bound_take_no_other() -> None:
    with pytest.raises(InvalidRequestError, match="staleness of sync is 1: give 0"):
        System(name=SystemName.SYNC, staleness=1)
