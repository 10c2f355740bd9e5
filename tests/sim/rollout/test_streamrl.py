"""StreamRL on the virtual clock: mini-batches, ranks, staleness, the split of the GPUs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.latency.costs import EngineCosts
from plexrl.sim.rollout.results.bound import throughput_bound
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.runs.split import best_splits, runner
from plexrl.sim.rollout.setting import (
    FIXED_STALENESS,
    RANKED,
    STREAMED,
    Setting,
    System,
    SystemName,
)
from plexrl.sim.rollout.systems.dynamic_batches import DynamicBatches
from plexrl.sim.rollout.systems.ranks import (
    ExpectedLengths,
    correlation,
    expected_ranks,
    recall_of,
)
from plexrl.sim.rollout.workload import Prompts, RolloutWorkload

SETTING = Setting(
    gpus=8,
    batch_groups=40,
    steps=5,
    warmup_steps=1,
    workload=RolloutWorkload(limit=12_000, group_size=2),
    costs=EngineCosts(kv_tokens=60_000),
)


def system(name: SystemName, *, rollout_gpus: int = 0, recall: float = 0.8) -> System:
    gpus = rollout_gpus if name in STREAMED else 0
    return System(name=name, staleness=FIXED_STALENESS[name], rollout_gpus=gpus, recall=recall)


def figures(setting: Setting, asked: System) -> RolloutOutcome:
    return outcome(setting, asked, simulate_rollout(setting, asked))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 8)), max_size=30),
    st.integers(0, 60),
)
def test_mini_batches_are_those_of_a_clock_of_single_tokens(
    samples: list[tuple[int, int]], fill: int
) -> None:
    """One token takes a second; the oracle looks at each second."""
    trainer = DynamicBatches(1.0, fill, 0.0)
    now, waiting, busy = 0, 0, 0
    for tokens, pause in samples:
        for _ in range(pause):
            now += 1
            busy = max(0, busy - 1)
            if not busy and waiting and waiting >= fill:
                waiting, busy = 0, waiting
        trainer.complete(tokens, now)
        waiting += tokens
        if not busy and waiting >= fill:
            waiting, busy = 0, waiting
    assert trainer.left_tokens(now) == pytest.approx(waiting + busy)


@pytest.mark.parametrize(("tail", "paper"), [(0.2, 0.87), (0.1, 0.82), (0.05, 0.76)])
def test_one_correlation_has_the_recalls_of_the_paper(tail: float, paper: float) -> None:
    assert recall_of(correlation(0.87), tail) == pytest.approx(paper, abs=0.05)


@pytest.mark.parametrize("recall", [0.2, 0.71, 0.87, 1.0])
def test_ranks_find_their_recall(recall: float) -> None:
    lengths = {prompt: float(prompt) for prompt in range(4000)}
    expected = expected_ranks(lengths, recall, seed=3)
    found = sorted(expected, key=lambda prompt: -expected[prompt])[:800]
    assert sum(prompt >= 3200 for prompt in found) / 800 == pytest.approx(recall, abs=0.03)


def test_prompts_are_expected_to_be_as_long_as_earlier_ones() -> None:
    prompts = Prompts(SETTING.workload)
    groups = [prompts.group(prompt) for prompt in range(200)]
    expected = ExpectedLengths(SETTING.workload, 200, 1.0)(groups)
    means = [sum(each.response_tokens for each in group) / len(group) for group in groups]
    by_mean = [tokens for _, tokens in sorted(zip(means, expected, strict=True))]
    assert by_mean == sorted(by_mean)
    assert sum(expected) == pytest.approx(sum(means), rel=0.1)


@pytest.mark.parametrize("name", STREAMED)
def test_no_sample_is_older_than_the_bound(name: SystemName) -> None:
    recorder = simulate_rollout(SETTING, system(name, rollout_gpus=5))
    for step in recorder.steps:
        assert max(step.staleness) <= FIXED_STALENESS[name]


@pytest.mark.parametrize("name", RANKED)
def test_batches_are_trained_whole(name: SystemName) -> None:
    recorder = simulate_rollout(SETTING, system(name, rollout_gpus=5), with_history=True)
    if not FIXED_STALENESS[name]:
        for lane in recorder.lanes:
            assert lane.group // SETTING.batch_groups == lane.buffer
            assert len({segment.version for segment in lane.segments}) == 1
    assert len(recorder.trained_numbers) == SETTING.steps * SETTING.batch_trajectories


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("train", [1e-4, 7e-4, 3e-3])
def test_no_schedule_exceeds_the_bound(name: SystemName, train: float) -> None:
    costs = replace(SETTING.costs, train_gpu_s_per_token=train)
    setting = replace(SETTING, warmup_steps=0, costs=costs)
    for gpus in (3, 5):
        found = figures(setting, system(name, rollout_gpus=gpus))
        assert found.throughput <= throughput_bound(setting, gpus)


def test_streaming_hides_training_and_one_step_hides_more() -> None:
    sync, ahead = (figures(SETTING, system(name, rollout_gpus=5)) for name in STREAMED)
    whole_s = SETTING.costs.train_s(sync.throughput * sync.step_s, 3)
    assert sync.step_s < sync.rollout_s + whole_s
    assert ahead.throughput > sync.throughput


@pytest.mark.parametrize("name", RANKED)
def test_equal_seeds_give_equal_runs(name: SystemName) -> None:
    first, again = (figures(SETTING, system(name, rollout_gpus=5)) for _ in range(2))
    assert replace(first, decision_ms=None) == replace(again, decision_ms=None)


def test_the_split_follows_the_costs_of_training() -> None:
    """The more a token costs to train, the fewer GPUs generate."""
    few = replace(SETTING, batch_groups=10, steps=3, workload=replace(SETTING.workload, limit=3000))
    found = []
    with runner(1) as run:
        for train in (1e-5, 1e-3, 1e-2):
            costs = replace(SETTING.costs, kv_tokens=20_000, train_gpu_s_per_token=train)
            asked = (replace(few, costs=costs), system(SystemName.STREAMRL_ASYNC))
            found.append(best_splits(run.outcome, [asked])[0].system.rollout_gpus)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_a_recall_worse_than_chance_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"recall is 0.1: give 0.2 to 1"):
        System(name=SystemName.STREAMRL_SKEW, recall=0.1)
